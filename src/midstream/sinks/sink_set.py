"""The sinks of one engine, opened, each with its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.config.sinks import SinkSettings
from midstream.errors import SpecError
from midstream.sinks.base import Origin, Sink
from midstream.sinks.queue import SinkQueue
from midstream.sinks.registry import make_sink
from midstream.spec import Capture, Plan
from midstream.spec.sink_target import MEMORY
from midstream.validation import at, hint, listed, show


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a sink that wants rows as they come is given some; see `Sink`."""

    seconds: float
    nbytes: int


class SinkSet:
    """What an engine was started with; `memory` is always among it."""

    def __init__(self, settings: Sequence[SinkSettings], origin: Origin) -> None:
        """Makes and opens them.

        Args:
            settings: of each.
            origin: where their rows will come from.

        Raises:
            ConfigError: there is no such sink, or a setting is wrong.
            Exception: whatever one of them raises when it is opened.
        """
        self._sinks: dict[str, Sink] = {}
        self._queues: dict[str, SinkQueue] = {}
        self.captures: tuple[Capture, ...] = tuple(
            capture for one in settings for capture in one.captures
        )
        made = [(one, make_sink(one)) for one in settings if one.name != MEMORY]
        try:
            for one, sink in made:
                sink.open(origin)
                self._sinks[one.name] = sink
                self._queues[one.name] = SinkQueue(one.name, sink, one.queue_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """What a capture's `sink` may be here."""
        return (MEMORY, *self._sinks)

    def check(self, plan: Plan) -> None:
        """Whether the rows of a plan's captures can go where they are to.

        Raises:
            SpecError: there is no such sink, or it cannot keep them under that tag or id.
        """
        for index, (sink, tag, request_id) in enumerate(one.place for one in plan.captures):
            if sink == MEMORY:
                continue
            with at(f"capture[{index}]"):
                if sink not in self._sinks:
                    raise SpecError(
                        "sink",
                        f"this engine has no sink {show(sink)}{hint(sink, self.names)}; it has "
                        f"{listed(self.names)}, and others if it is started with "
                        f'midstream={{"sinks": {{"{sink}": {{…}}}}}}',
                    )
                self._sinks[sink].check(tag, request_id)

    def queue(self, name: str) -> SinkQueue:
        """The way to one of them, which is not `memory`."""
        return self._queues[name]

    def pace(self, name: str) -> Pace | None:
        """How often a sink gets rows of requests that run; None: not before their end."""
        sink = self._sinks.get(name)
        if sink is None or sink.wants != "rows":
            return None
        return Pace(sink.piece_seconds, sink.piece_bytes)

    @property
    def unwritten(self) -> dict[str, int]:
        """By sink, how many bytes it was given that are not there for good."""
        return {name: queue.unwritten for name, queue in self._queues.items()}

    def drain(self) -> None:
        """Nothing else will come for now: what did is written and flushed."""
        for queue in self._queues.values():
            queue.drain()

    def close(self) -> None:
        """Writes and flushes what came, and closes them all. Waits for that."""
        for queue in self._queues.values():
            queue.close()
