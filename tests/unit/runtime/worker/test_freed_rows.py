"""Memory of rows that nobody reads is used again only after their copy: one that comes later would
overwrite the rows of another request.
"""

from dataclasses import dataclass, field
from typing import Any

from support.fake_steps import TAPS, Fake, FakeEngine, check_taken
from support.plans import plan_of
from support.stored import make_arena

from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Parcel, Shipment

ALL = plan_of(captures=[(list(TAPS), ((0, None),))])


@dataclass
class Copying:
    """A shipment whose rows are on their way until it is waited for, or `arrive` is called."""

    shipment: Shipment
    extents: tuple[Extent | None, ...]
    rows: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for extent in self.extents:
            if extent is not None:
                self.rows.append((extent.memory, extent.memory.clone()))
                extent.memory.zero_()

    def wait(self) -> None:
        while self.rows:
            memory, rows = self.rows.pop()
            memory.copy_(rows)

    def ready(self) -> bool:
        return not self.rows

    def tally(self) -> Any:
        self.wait()
        return self.shipment.tally()

    def free_staging(self) -> None:
        self.shipment.free_staging()

    def scores(self) -> Any:
        return self.shipment.scores()


class Late:
    """An engine whose copies are under way for a while, like those beside the model's own stream.

    Attributes:
        under_way: the shipments that were late.
        is_late: whether the copies of the next shipments are under way for a while.
    """

    def __init__(self, arena: Arena, **sizes: int) -> None:
        self.engine = FakeEngine(arena=arena, **sizes)
        self.under_way: list[Copying] = []
        self.is_late = False
        inner, transport = self.engine.transport.ship, self.engine.transport

        def ship(parcels: list[Parcel], tally: Any, scores: Any) -> Any:
            shipment = inner(parcels, tally, scores)
            if not self.is_late or not any(shipment.extents):
                return shipment
            self.under_way.append(Copying(shipment, shipment.extents))
            return self.under_way[-1]

        transport.ship = ship  # type: ignore[method-assign]

    def arrive(self) -> None:
        """What is still under way arrives."""
        assert self.under_way
        for one in self.under_way:
            one.wait()

    def check_next(self) -> None:
        """The rows of a new request are right, whatever arrives after them."""
        fake = Fake("next", ALL)
        self.engine.add(fake)
        self.is_late = False
        self.engine.step([(fake, 4)])
        self.arrive()
        check_taken(self.engine.take("next"), [fake])


def test_rows_that_were_streamed_before_they_were_computed_again() -> None:
    late = Late(make_arena())
    engine, fake = late.engine, Fake("a", ALL)
    engine.add(fake)
    engine.step([(fake, 5)])
    with engine.session.collection.collect_partial({"a": {"a": 5}}) as found:
        assert [block.spans for block in found["a"][0].blocks] == [[(0, 5)]]
    fake.computed = 0  # preempted
    engine.add(fake)
    late.is_late = True
    engine.step([(fake, 5)])
    with engine.session.collection.collect_partial({"a": {"a": 5}}) as found:
        assert not found["a"][0].blocks
    late.check_next()
