"""`Threshold`, the law of a `Controller`, and what controllers are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from midstream.errors import SpecError
from midstream.plan.argument_names import read_named
from midstream.validation import at, kind, listed, read_float32

# Most scales, times sets of edits, that a controller in the engine core chooses from.
MOST_SCALES = 64
_REQUIRED = ("probe", "above")
_DEFAULTS = {"below": None, "on": 1.0, "off": 0.0}


@dataclass(frozen=True, slots=True)
class Observed:
    """What a controller is given.

    Attributes:
        request_id: the request's id; in `mode="sync"`, vLLM's own, which begins with it.
        tokens: number of tokens generated so far.
        scores: float32 [n], by probe: its scores since the controller was called last; at first
            those of the prompt too. n may be 0.
        rows: in `mode="async"`, the `Activations` of the request's captures with `stream=True`, all
            so far; None: it has none.
    """

    request_id: str
    tokens: int
    scores: Mapping[str, Any]
    rows: Any = None


@dataclass(slots=True, unsafe_hash=True)
class Threshold:
    """`on` once a score of the probe exceeds `above`, then `off` once one is at most `below`.

    It is called with what was observed and returns a scale. Two with the same parameters are equal,
    whatever they have observed.

    Attributes:
        probe: name of the probe.
        above, below: the thresholds, below ≤ above; None: `above`, without hysteresis.
        on, off: the scales. It is off at first.
    """

    probe: str
    above: float
    below: float | None = None
    on: float = 1.0
    off: float = 0.0
    _is_on: bool = field(default=False, init=False, compare=False)
    word: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        with at("probe"):
            if not isinstance(self.probe, str):
                raise SpecError("", f"expected the name of a probe, got {kind(self.probe)}")
        for name in ("above", "below", "on", "off"):
            value = getattr(self, name)
            if name != "below" or value is not None:
                with at(name):
                    setattr(self, name, read_float32(value))
        if self.below is not None and self.below > self.above:
            raise SpecError(
                "below", f"expected at most `above`, {self.above:g}, got {self.below:g}"
            )

    @staticmethod
    def parse(value: object) -> Threshold:
        """Read it of the dict of its parameters."""
        if not isinstance(value, Mapping):
            names = listed([*_REQUIRED, *_DEFAULTS])
            raise SpecError("", f"expected a dict of {names}, got {kind(value)}")
        return Threshold(**read_named(value, _REQUIRED, tuple(_DEFAULTS)))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `parse` reads: the parameters that differ from defaults."""
        fields = {name: getattr(self, name) for name in _DEFAULTS}
        changed = {name: value for name, value in fields.items() if value != _DEFAULTS[name]}
        return {"probe": self.probe, "above": self.above, **changed}

    def __call__(self, observed: Observed) -> float:
        """Return the scale after what was observed."""
        return self.follow(observed.scores[self.probe].tolist())

    def follow(self, scores: Sequence[float]) -> float:
        """Return the scale after the next scores of the probe."""
        for score in scores:
            self._is_on = self._is_on_after(score)
        return self.on if self._is_on else self.off

    def holds(self, score: float, scale: float | None) -> bool:
        """Return whether it would answer this scale to the next score and keep its state."""
        is_on = self._is_on_after(score)
        return is_on is self._is_on and scale == (self.on if is_on else self.off)

    def _is_on_after(self, score: float) -> bool:
        below = self.above if self.below is None else self.below
        return score > (below if self._is_on else self.above)

    def scales(self) -> tuple[float, ...]:
        """Return every scale that it may answer."""
        return self.off, self.on
