"""`ModelShape`: a model's dimensions and the engine's taps, for checking plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    """

    num_layers: int
    hidden_size: int
    taps: frozenset[Tap]
    reasons: tuple[tuple[Tap, str], ...]
    dtype: str

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        taps: Iterable[Tap],
        reasons: Mapping[Tap, str] | Iterable[tuple[Tap, str]] = (),
        dtype: str = "float32",
    ) -> None:
        object.__setattr__(self, "num_layers", num_layers)
        object.__setattr__(self, "hidden_size", hidden_size)
        object.__setattr__(self, "taps", frozenset(taps))
        object.__setattr__(self, "reasons", tuple(sorted(dict(reasons).items())))
        object.__setattr__(self, "dtype", dtype)

    def reason(self, tap: Tap) -> str | None:
        """Return why the model lacks this tap; None if it does not lack it."""
        return dict(self.reasons).get(tap)

    def tapped_layers(self, site: str) -> list[int]:
        """Return the layers at which a site is tapped, ascending."""
        return sorted(layer for name, layer in self.taps if name == site)
