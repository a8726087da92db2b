"""Control laws for `Controller`: threshold with hysteresis, PID, decay and budget.

Each is an object that is called with what was observed and returns a scale. Laws with the same
parameters are equal, whatever they have observed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from midstream.errors import SpecError
from midstream.spec.argument_names import read_named
from midstream.validation import at, kind, listed, read_float32, read_int

# Most scales, times sets of edits, that a controller in the engine core chooses from.
MOST_SCALES = 64


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


class _Called:
    """A law that is called with what was observed."""

    __slots__ = ()

    def __call__(self: Any, observed: Observed) -> float | None:
        probe: str | None = getattr(self, "probe", None)
        scores = [] if probe is None else observed.scores[probe].tolist()
        answer: float | None = self.follow(observed.tokens, scores)
        return answer


@dataclass(slots=True, unsafe_hash=True)
class Threshold(_Called):
    """`on` once a score of the probe exceeds `above`, then `off` once one is at most `below`.

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
        _check_numbers(self)
        if self.below is not None and self.below > self.above:
            raise SpecError(
                "below", f"expected at most `above`, {self.above:g}, got {self.below:g}"
            )

    def follow(self, tokens: int, scores: Sequence[float]) -> float:
        """Return the scale after `tokens` generated tokens and the next scores of the probe."""
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


@dataclass(slots=True, unsafe_hash=True)
class Pid(_Called):
    """scale = 1 + kp · e + ki · Σe + kd · Δe, with e = target − score of the latest token.

    The sum is not increased while the scale is at a limit. Scales are rounded to the multiples of
    `step` from `low` to `high`: each takes room on the workers until its request ends.

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
    _sum: float = field(default=0.0, init=False, compare=False)
    _last: float | None = field(default=None, init=False, compare=False)
    word: ClassVar[str] = "pid"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.low > self.high:
            raise SpecError("low", f"expected at most `high`, {self.high:g}, got {self.low:g}")
        if self.step <= 0:
            raise SpecError("step", f"expected more than 0, got {self.step:g}")
        first, last = self._multiples()
        if last - first < (self.low < self.high):
            raise SpecError(
                "step",
                f"expected a step with two multiples from {self.low:g} to {self.high:g}, between "
                f"which the scale changes, got {self.step:g}",
            )

    def follow(self, tokens: int, scores: Sequence[float]) -> float | None:
        """Return the scale after `tokens` generated tokens and the next scores of the probe; None:
        there is none.
        """
        scale = None
        for score in scores:
            if not math.isfinite(score):
                raise ValueError(f"a score of {self.probe} is {score}")
            error = self.target - score
            change = 0.0 if self._last is None else error - self._last
            wanted = 1.0 + self.kp * error + self.ki * (self._sum + error) + self.kd * change
            scale = min(max(wanted, self.low), self.high)
            if scale == wanted:
                self._sum += error
            self._last = error
        if scale is None:
            return None
        first, last = self._multiples()
        found: float = min(max(round(scale / self.step), first), last) * self.step
        return found

    def scales(self) -> tuple[float, ...]:
        """Return every scale that it may answer, or more than `MOST_SCALES` of them."""
        first, last = self._multiples()
        last = min(last, first + MOST_SCALES)
        return tuple(nth * self.step for nth in range(first, last + 1))

    def _multiples(self) -> tuple[int, int]:
        """Return the first and the last multiple of the step within the limits. A limit that is a
        multiple but for rounding, to float32 or by the division, counts as one.
        """
        slack = 1e-6 * max(1.0, abs(self.low / self.step), abs(self.high / self.step))
        return math.ceil(self.low / self.step - slack), math.floor(self.high / self.step + slack)


@dataclass(slots=True, unsafe_hash=True)
class Decay(_Called):
    """The scale halves after each `half_life` generated tokens, in steps of a half; below `least`
    it is 0.

    Attributes:
        half_life: number of tokens, at least 1.
        least: the smallest scale but 0.
    """

    half_life: int
    least: float = 0.01
    word: ClassVar[str] = "decay"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.half_life < 1:
            raise SpecError("half_life", f"expected at least 1 token, got {self.half_life}")
        if not 0 < self.least <= 1:
            raise SpecError("least", f"expected more than 0, and at most 1, got {self.least:g}")

    def follow(self, tokens: int, scores: Sequence[float]) -> float:
        """Return the scale after `tokens` generated tokens."""
        scale = float(0.5 ** (tokens // self.half_life))
        return scale if scale >= self.least else 0.0

    def scales(self) -> tuple[float, ...]:
        """Return every scale that it may answer, or more than `MOST_SCALES` of them."""
        halves = (0.5**nth for nth in range(MOST_SCALES + 1))
        return (0.0, *(scale for scale in halves if scale >= self.least))


@dataclass(slots=True, unsafe_hash=True)
class Budget(_Called):
    """Scale 1 until the scores of the probe above 0 add up to `total`, then 0.

    Attributes:
        probe: name of the probe.
        total: the budget, above 0.
    """

    probe: str
    total: float
    _spent: float = field(default=0.0, init=False, compare=False)
    word: ClassVar[str] = "budget"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.total <= 0:
            raise SpecError("total", f"expected more than 0, got {self.total:g}")

    def follow(self, tokens: int, scores: Sequence[float]) -> float:
        """Return the scale after `tokens` generated tokens and the next scores of the probe."""
        self._spent += sum(max(score, 0.0) for score in scores)
        return 1.0 if self._spent < self.total else 0.0

    def scales(self) -> tuple[float, ...]:
        """Return every scale that it may answer."""
        return 0.0, 1.0


Law = Threshold | Pid | Decay | Budget
LAWS: dict[str, type[Law]] = {each.word: each for each in (Threshold, Pid, Decay, Budget)}


def read_law(word: str, value: object) -> Law:
    """Read a law of its JSON form, the dict of its parameters.

    Args:
        word: one of `LAWS`.
        value: the dict.

    Raises:
        SpecError: it is malformed; the path is relative to `value`.
    """
    parameters = [each for each in dataclasses.fields(LAWS[word]) if each.init]
    names = [each.name for each in parameters]
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected a dict of {listed(names)}, got {kind(value)}")
    needed = [each.name for each in parameters if each.default is dataclasses.MISSING]
    return LAWS[word](**read_named(value, needed, names[len(needed) :]))


def emit_law(law: Law) -> dict[str, Any]:
    """Return the JSON form of a law, such as `{"threshold": {"probe": "p", "above": 2.0}}`."""
    given = {each.name: each for each in dataclasses.fields(law) if each.init}
    values = {name: getattr(law, name) for name in given}
    return {law.word: {name: v for name, v in values.items() if v != given[name].default}}


def _check_numbers(law: Law) -> None:
    """Read the parameters of a law: finite numbers, and the name of a probe.

    Raises:
        SpecError: one is malformed; the path is its name.
    """
    for each in dataclasses.fields(law):
        value = getattr(law, each.name)
        if not each.init or (value is None and each.default is None):
            continue
        with at(each.name):
            if each.name == "probe":
                if not isinstance(value, str):
                    raise SpecError("", f"expected the name of a probe, got {kind(value)}")
            elif each.type == "int":
                setattr(law, each.name, read_int(value))
            else:
                setattr(law, each.name, read_float32(value))
