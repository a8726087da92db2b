"""What must be known of an engine to check a request against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midstream.sites import Tap


@dataclass(frozen=True, slots=True, init=False)
class ModelShape:
    """The model, and where the engine taps it.

    Attributes:
        num_layers: layers of the model.
        hidden_size: width of its residual stream.
        taps: each (canonical site, layer from 0) that is tapped.
        reasons: each (site, layer) that the model does not have, and why; sorted.
    """

    num_layers: int
    hidden_size: int
    taps: frozenset[Tap]
    reasons: tuple[tuple[Tap, str], ...]

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        taps: Iterable[Tap],
        reasons: Mapping[Tap, str] | Iterable[tuple[Tap, str]] = (),
    ) -> None:
        object.__setattr__(self, "num_layers", num_layers)
        object.__setattr__(self, "hidden_size", hidden_size)
        object.__setattr__(self, "taps", frozenset(taps))
        object.__setattr__(self, "reasons", tuple(sorted(dict(reasons).items())))

    def reason(self, tap: Tap) -> str | None:
        """Why the model has no such site, if that is why it is not tapped."""
        return dict(self.reasons).get(tap)

    def tapped_layers(self, site: str) -> list[int]:
        """The layers at which a site is tapped, ascending."""
        return sorted(layer for name, layer in self.taps if name == site)
