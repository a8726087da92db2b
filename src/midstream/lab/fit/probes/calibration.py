"""Calibration of scores to probabilities, and how well held-out probabilities agree with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.intervals import Floats, Interval, rate_of
from midstream.plan.probe_files.info import Calibration
from midstream.steering.listing import text_table
from midstream.viz import Chart, curve
from midstream.viz.chart import Charted


@dataclass(frozen=True)
class ReliabilityBin:
    """Held-out texts of similar probabilities: how many, their mean, and the share of positives."""

    count: int
    predicted: float
    observed: Interval


@dataclass(frozen=True, eq=False)
class CalibrationReport(Charted):
    """Probabilities of held-out texts, each from a map that was fitted without its fold.

    Attributes:
        fitted: the `FittedProbe` with the map that was fitted to all held-out scores.
        bins: the reliability table: ten bins of equal width, without empty ones.
        brier: mean squared difference of probability and label (Brier 1950).
        ece: expected calibration error, the mean over texts of |share of positives − mean
            probability| of their bins (Naeini et al. 2015).
        probabilities: float64 [held-out texts].
    """

    fitted: Any
    bins: Sequence[ReliabilityBin]
    brier: float
    ece: float
    probabilities: Floats

    def __str__(self) -> str:
        rows = [(f"{bin.predicted:.3f}", str(bin.observed), str(bin.count)) for bin in self.bins]
        table = text_table(("probability", "share of positives", "texts"), rows)
        return f"{table}\nBrier {self.brier:.4f}, ECE {self.ece:.4f}"

    def picture(self) -> Chart:
        """Return the share of positives over the mean probability of each bin."""
        x = np.array([bin.predicted for bin in self.bins])
        values, low, high = np.array([bin.observed for bin in self.bins]).T
        return curve(
            x,
            {"held-out texts": values, "calibrated": x},
            title=f"Brier {self.brier:.4f}, ECE {self.ece:.4f}",
            x_title="probability",
            y_title="share of positives",
            ranges={"held-out texts": [low, high]},
        )


def calibration_of(scores: Floats, labels: Indices, method: str) -> Calibration:
    """Return the map that is fitted to scores [n] and labels [n], by scikit-learn.

    "isotonic" is `IsotonicRegression`; "sigmoid" is Platt's (1999), as `CalibratedClassifierCV` has
    it, with his targets (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2) in place of 1 and 0.
    """
    if method == "isotonic":
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(out_of_bounds="clip", y_min=0, y_max=1).fit(scores, labels)
        knots = zip(model.X_thresholds_.tolist(), model.y_thresholds_.tolist(), strict=True)
        return Calibration.parse({"method": method, "values": list(knots)})
    from sklearn.linear_model import LogisticRegression

    positives = int(labels.sum())
    targets = np.where(labels, (positives + 1) / (positives + 2), 1 / (len(labels) - positives + 2))
    # Each text twice: as a positive with the weight of its target, and as a negative with the rest.
    # In units of the scores' spread, which a solver's tolerance is of.
    center, spread = scores.mean(), scores.std() or 1.0
    twice = np.tile((scores - center) / spread, 2)[:, None]
    sides, weights = np.repeat([1, 0], len(scores)), np.concatenate([targets, 1 - targets])
    model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(twice, sides, weights)
    slope = float(model.coef_[0, 0]) / spread
    pair = (-slope, -(float(model.intercept_[0]) - slope * center))
    return Calibration.parse({"method": method, "values": [pair]})


def cross_fitted(scores: Floats, labels: Indices, folds: Indices, method: str) -> Floats:
    """Return the probability of each text by a map that was fitted without its fold, [n]."""
    probabilities = np.empty(len(scores))
    for fold in np.unique(folds):
        rest = folds != fold
        probabilities[~rest] = calibration_of(scores[rest], labels[rest], method)(scores[~rest])
    return probabilities


def report_of(
    fitted: object, probabilities: Floats, labels: Indices, confidence: float
) -> dict[str, Any]:
    """Return the arguments of a `CalibrationReport`."""
    from sklearn.metrics import brier_score_loss

    places = np.clip((probabilities * 10).astype(int), 0, 9)
    bins = []
    for place in np.unique(places):
        mine = places == place
        observed = rate_of(labels[mine].astype(bool), confidence)
        bins.append(ReliabilityBin(int(mine.sum()), float(probabilities[mine].mean()), observed))
    gaps = [bin.count * abs(bin.observed.value - bin.predicted) for bin in bins]
    return {
        "fitted": fitted,
        "bins": tuple(bins),
        "brier": float(brier_score_loss(labels, probabilities)),
        "ece": float(sum(gaps) / len(labels)),
        "probabilities": probabilities,
    }
