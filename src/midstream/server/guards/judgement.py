"""What the scores of a guard's probe say of one completion."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.plan.control.act import Condition, Progress, follow
from midstream.plan.probe import Probe
from midstream.plan.scores.pools import NO_POOL, NOTHING_POOLED, pooled
from midstream.results.probe_scores import Probes


class GuardJudgement(NamedTuple):
    """How near a completion is to meeting a guard's condition, and where it met it first.

    Attributes:
        peak: the pooled score that decides; see `peak_of`.
        position: of the token whose score met the condition; None: it is not met.
        score: the pooled score there; the peak if it is not met.
    """

    peak: float
    position: int | None
    score: float

    def is_beyond(self, above: float | None, below: float | None) -> bool:
        """Return whether the peak is beyond a threshold; without one whether it met its own."""
        if above is None and below is None:
            return self.position is not None
        return self.peak > above if above is not None else self.peak < float(below or 0.0)


def judge(condition: Condition, probes: Probes | None, probe: Probe) -> GuardJudgement | None:
    """Return what a probe's scores say; None: there are none that are finite."""
    if probes is None or probe.name not in probes:
        return None
    positions: NDArray[np.int64] = probes.positions_of(probe.name).numpy()
    scores = probes[probe.name].numpy()
    if probe.classes is not None and condition.output is not None:
        scores = scores[:, probe.classes.index_of(condition.output)]
    return judge_scores(condition, scores, positions)


def judge_scores(
    condition: Condition, scores: NDArray[np.float32], positions: NDArray[np.int64]
) -> GuardJudgement | None:
    """Return what scores, float32 [rows], say of the tokens at positions, int64 [rows]."""
    highest = peak_of(condition, scores)
    if highest is None:
        return None
    judgement = GuardJudgement(highest, None, highest)
    if not judgement.is_beyond(condition.above, condition.below):
        return judgement
    _, met = follow(condition, Progress(), scores.tolist())
    assert met is not None
    return GuardJudgement(highest, int(positions[met.nth]), met.pooled)


def peak_of(condition: Condition, scores: NDArray[np.float32]) -> float | None:
    """Return the pooled score nearest to meeting a condition, or furthest beyond it, of scores
    float32 [rows]: that of the row and the `for_` − 1 before it that is the least so. It is beyond
    the threshold if and only if the condition is met. None: there are too few finite ones.
    """
    values = np.asarray(scores, np.float64)
    if condition.pool != NO_POOL:
        _, pooled_scores = pooled(condition.pool, NOTHING_POOLED, values.tolist())
        values = np.array(pooled_scores, np.float64)
    sign = 1.0 if condition.above is not None else -1.0
    values = np.where(np.isfinite(values), sign * values, -math.inf)
    if values.size < condition.for_:
        return None
    if condition.for_ > 1:
        values = np.lib.stride_tricks.sliding_window_view(values, condition.for_).min(axis=1)
    highest = float(values.max())
    return sign * highest if math.isfinite(highest) else None
