"""`ModelShape`: a model's dimensions and the engine's taps, for checking plans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from midstream.sites import OUTER, Tap

if TYPE_CHECKING:
    from typing_extensions import Self


def unit_of(site: str) -> str:
    """Return what the parts of a site's vectors are called, of which `heads` is the number."""
    return "streams" if site in OUTER else "heads"


class VectorSize(int):
    """The number of components of the vectors at a tap.

    Attributes:
        heads: number of attention heads, one after the other, that these are of, or of streams of a
            model with several; 0: of none.
        routing: number of experts that are chosen by the largest components; or why the choice is
            not the largest ones; 0: they are not of experts.
    """

    meaning: str
    heads: int
    routing: int | str

    def __new__(
        cls,
        size: int,
        meaning: str = "the model's hidden size",
        heads: int = 0,
        routing: int | str = 0,
    ) -> Self:
        vector_size = super().__new__(cls, size)
        vector_size.meaning = meaning
        vector_size.heads = heads
        vector_size.routing = routing
        return vector_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions and the taps of the engine.

    Attributes:
        hidden_size: width of its residual stream.
        taps: the tapped (canonical site, layer from 0) pairs.
        reasons: the (site, layer) pairs that the model lacks, each with the reason; sorted.
        dtype: name of the stream's dtype.
        widths: of the taps with another width than the stream's; over all ranks; sorted.
        heads: the taps whose vectors are of attention heads, each with the number of heads; sorted.
        routing: the taps of routers, each with `VectorSize.routing`; sorted.
    """

    num_layers: int
    hidden_size: int
    taps: Collection[Tap]
    reasons: Sequence[tuple[Tap, str]] = ()
    dtype: str = "float32"
    widths: Sequence[tuple[Tap, int]] = ()
    heads: Sequence[tuple[Tap, int]] = ()
    routing: Sequence[tuple[Tap, int | str]] = ()
    _width_of: dict[Tap, int] = field(init=False, compare=False, repr=False)
    _heads_of: dict[Tap, int] = field(init=False, compare=False, repr=False)
    _reason_of: dict[Tap, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", frozenset(self.taps))
        for name in ("reasons", "widths", "heads", "routing"):  # mappings too
            object.__setattr__(self, name, tuple(sorted(dict(getattr(self, name)).items())))
        object.__setattr__(self, "_width_of", dict(self.widths))
        object.__setattr__(self, "_heads_of", dict(self.heads))
        object.__setattr__(self, "_reason_of", dict(self.reasons))

    def width(self, tap: Tap) -> int:
        """Return the number of components of a tap's vectors."""
        return self._width_of.get(tap, self.hidden_size)

    def num_heads(self, tap: Tap) -> int:
        """Return the number of heads that a tap's vectors are of; 0: they are not of heads."""
        return self._heads_of.get(tap, 0)

    def size(self, tap: Tap) -> VectorSize:
        """Return the number of components of a tap's vectors, for `Operation.steps`."""
        width, heads = self.width(tap), self.num_heads(tap)
        routing = dict(self.routing).get(tap, 0)
        if tap not in self._width_of and not heads:
            return VectorSize(width, routing=routing)
        of_heads = f", {heads} {unit_of(tap[0])} of {width // heads}" if heads else ""
        return VectorSize(width, f"the width of {tap[0]}{of_heads}", heads, routing)

    @property
    def sizes(self) -> frozenset[int]:
        """The sizes that vectors of this model have: those of its taps, and of their heads."""
        of_heads = (self.width(tap) // heads for tap, heads in self.heads)
        return frozenset((self.hidden_size, *self._width_of.values(), *of_heads))

    def reason(self, tap: Tap) -> str | None:
        """Return why the model lacks this tap; None if it does not lack it."""
        return self._reason_of.get(tap)

    def tapped_layers(self, site: str) -> list[int]:
        return sorted(layer for name, layer in self.taps if name == site)
