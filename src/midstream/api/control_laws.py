"""Control laws for `Controller`: threshold with hysteresis, PID, decay and budget.

Each is an object that is called with what was observed and returns a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.api.controller import Observed
from midstream.errors import SpecError


@dataclass(slots=True)
class Threshold:
    """`on` once a score of the probe exceeds `above`, then `off` once one is at most `below`.

    Attributes:
        probe: name of the probe.
        above, below: the thresholds, below ≤ above; None: `above`, without hysteresis.
        on, off: the scales. The request begins with `off`.
    """

    probe: str
    above: float
    below: float | None = None
    on: float = 1.0
    off: float = 0.0
    _is_on: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.below is not None and self.below > self.above:
            raise SpecError(
                "below", f"expected at most `above`, {self.above:g}, got {self.below:g}"
            )

    def __call__(self, observed: Observed) -> float:
        below = self.above if self.below is None else self.below
        for score in observed.scores[self.probe].tolist():
            self._is_on = score > (below if self._is_on else self.above)
        return self.on if self._is_on else self.off


@dataclass(slots=True)
class Pid:
    """scale = 1 + kp · e + ki · Σe + kd · Δe, with e = target − score of the latest token.

    The sum is not increased while the scale is at a limit. Scales are rounded to multiples of
    `step`: each different one takes room on the workers until its request ends.

    Attributes:
        probe: name of the probe.
        target: what its score is to be.
        kp, ki, kd: gains, for each token.
        low, high: limits of the scale.
        step: distance between scales.
    """

    probe: str
    target: float
    kp: float
    ki: float = 0.0
    kd: float = 0.0
    low: float = 0.0
    high: float = 2.0
    step: float = 0.125
    _sum: float = field(default=0.0, init=False)
    _last: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.low <= self.high or self.step <= 0:
            raise SpecError("low", "expected low ≤ high, and a step above 0")

    def __call__(self, observed: Observed) -> float | None:
        scale = None
        for score in observed.scores[self.probe].tolist():
            error = self.target - score
            change = 0.0 if self._last is None else error - self._last
            wanted = 1.0 + self.kp * error + self.ki * (self._sum + error) + self.kd * change
            scale = min(max(wanted, self.low), self.high)
            if scale == wanted:
                self._sum += error
            self._last = error
        return None if scale is None else round(scale / self.step) * self.step


@dataclass(slots=True)
class Decay:
    """The scale halves after each `half_life` generated tokens, in steps of a half; below `least`
    it is 0.

    Attributes:
        half_life: number of tokens, at least 1.
        least: the smallest scale but 0.
    """

    half_life: int
    least: float = 0.01

    def __post_init__(self) -> None:
        if self.half_life < 1:
            raise SpecError("half_life", f"expected at least 1 token, got {self.half_life}")

    def __call__(self, observed: Observed) -> float:
        scale = float(0.5 ** (observed.tokens // self.half_life))
        return scale if scale >= self.least else 0.0


@dataclass(slots=True)
class Budget:
    """Scale 1 until the scores of the probe above 0 add up to `total`, then 0.

    Attributes:
        probe: name of the probe.
        total: the budget.
    """

    probe: str
    total: float
    _spent: float = field(default=0.0, init=False)

    def __call__(self, observed: Observed) -> float:
        self._spent += float(observed.scores[self.probe].clamp(min=0).sum())
        return 1.0 if self._spent < self.total else 0.0
