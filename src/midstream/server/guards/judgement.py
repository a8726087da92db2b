"""What the scores of a guard's probe say of one completion."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.plan.control.act import Condition, Progress, follow, is_beyond, peak
from midstream.results.probe_scores import Probes


class Judgement(NamedTuple):
    """How near a completion is to meeting a guard's condition, and where it met it first.

    Attributes:
        peak: the pooled score that decides; see `midstream.plan.control.act.peak`.
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


def judge(condition: Condition, probes: Probes | None, name: str) -> Judgement | None:
    """Return what a probe's scores say; None: there are none that are finite."""
    if probes is None or name not in probes:
        return None
    positions: NDArray[np.int64] = probes.positions_of(name).numpy()
    return judge_scores(condition, probes[name].numpy(), positions)


def judge_scores(
    condition: Condition, scores: NDArray[np.float32], positions: NDArray[np.int64]
) -> Judgement | None:
    """Return what scores, float32 [rows], say of the tokens at positions, int64 [rows]."""
    highest = peak(condition, scores)
    if highest is None:
        return None
    if not is_beyond(condition, highest):
        return Judgement(highest, None, highest)
    _, met = follow(condition, Progress(), scores.tolist())
    assert met is not None
    return Judgement(highest, int(positions[met.nth]), met.pooled)
