"""`ModelShape`: a model's dimensions and the engine's taps, for checking plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from midstream.sites import Tap


@dataclass(frozen=True, slots=True, init=False)
class ModelShape:
    """A model's dimensions and the taps of the engine.

    Attributes:
        num_layers: number of layers of the model.
        hidden_size: width of its residual stream.
        taps: the tapped (canonical site, layer from 0) pairs.
        reasons: the (site, layer) pairs that the model lacks, each with the reason; sorted.
        dtype: name of the stream's dtype.
        widths: the taps whose vectors are not as wide as the residual stream, each with its width;
            sorted. Under tensor parallelism the width is that of all ranks together.
    """

    num_layers: int
    hidden_size: int
    taps: frozenset[Tap]
    reasons: tuple[tuple[Tap, str], ...]
    dtype: str
    widths: tuple[tuple[Tap, int], ...]
    _width_of: dict[Tap, int] = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        taps: Iterable[Tap],
        reasons: Mapping[Tap, str] | Iterable[tuple[Tap, str]] = (),
        dtype: str = "float32",
        widths: Mapping[Tap, int] | Iterable[tuple[Tap, int]] = (),
    ) -> None:
        object.__setattr__(self, "num_layers", num_layers)
        object.__setattr__(self, "hidden_size", hidden_size)
        object.__setattr__(self, "taps", frozenset(taps))
        object.__setattr__(self, "reasons", tuple(sorted(dict(reasons).items())))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "widths", tuple(sorted(dict(widths).items())))
        object.__setattr__(self, "_width_of", dict(self.widths))

    def width(self, tap: Tap) -> int:
        """Return the number of components of a tap's vectors."""
        return self._width_of.get(tap, self.hidden_size)

    def reason(self, tap: Tap) -> str | None:
        """Return why the model lacks this tap; None if it does not lack it."""
        return dict(self.reasons).get(tap)

    def tapped_layers(self, site: str) -> list[int]:
        """Return the layers at which a site is tapped, ascending."""
        return sorted(layer for name, layer in self.taps if name == site)
