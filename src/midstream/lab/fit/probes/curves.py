"""Curves of a fitted probe: true against false positives, and what more texts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midstream.lab.fit.probes.intervals import Floats, Interval
from midstream.steering.listing import text_table
from midstream.viz import Chart, curve
from midstream.viz.chart import Charted

_PLACES = 401  # of the steps that are drawn


@dataclass(frozen=True, eq=False)
class Roc(Charted):
    """The ROC curve of held-out texts: scikit-learn's `roc_curve`.

    Attributes:
        fpr, tpr: float64 [points], false and true positive rates, ascending from 0 to 1.
        thresholds: float64 [points], descending; a score of at least so much counts as positive.
            The first is infinite.
        auc: the area below it.
    """

    fpr: Floats
    tpr: Floats
    thresholds: Floats
    auc: Interval

    def __str__(self) -> str:
        return f"ROC of {len(self.fpr)} points, AUC {self.auc}"

    def picture(self) -> Chart:
        """Return the true positive rate over the false positive rate."""
        x = np.linspace(0, 1, _PLACES)
        rates = self.tpr[np.searchsorted(self.fpr, x, side="right") - 1]  # the highest of each
        return curve(
            x,
            {"probe": rates, "guessing": x},
            title=f"held-out texts, AUC {self.auc}",
            x_title="false positive rate",
            y_title="true positive rate",
        )


@dataclass(frozen=True, eq=False)
class LearningCurve(Charted):
    """Held-out AUC by the number of texts that were fitted.

    Attributes:
        sizes: numbers of texts, ascending.
        aucs: of each size, on the same held-out texts.
    """

    sizes: tuple[int, ...]
    aucs: Sequence[Interval]

    def __str__(self) -> str:
        rows = [(str(size), str(auc)) for size, auc in zip(self.sizes, self.aucs, strict=True)]
        return text_table(("texts", "AUC"), rows)

    def picture(self) -> Chart:
        """Return the area over the number of texts, with its confidence interval as bars."""
        values, low, high = np.array(self.aucs).T
        return curve(
            list(self.sizes),
            {"AUC": values},
            title="held-out AUC",
            x_title="texts fitted",
            y_title="AUC",
            ranges={"AUC": [np.minimum(low, values), np.maximum(high, values)]},
            level=0.5,
        )
