"""Scores of a direction, from projections of rows that it was not fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCORES = ("auc", "accuracy", "d_prime")
ERRORS = tuple(f"{name}_error" for name in SCORES)


@dataclass(frozen=True)
class LayerScore:
    """Scores of one layer's direction on rows that it was not fitted on.

    Attributes:
        auc: probability that a random positive lies further along it than a random negative; 0.5
            is guessing.
        accuracy: fraction on the right side of the midpoint between the two class means.
        d_prime: distance between the classes, in standard deviations within a class; 4.5e15 where
            neither class varies, and 0 where there is no distance.
        auc_error, accuracy_error, d_prime_error: standard errors of these over the folds, by the
            jackknife that leaves out one fold at a time (Quenouille 1956, Tukey 1958); None:
            unknown.
    """

    auc: float
    accuracy: float
    d_prime: float
    auc_error: float | None = None
    accuracy_error: float | None = None
    d_prime_error: float | None = None

    @staticmethod
    def of(positive: NDArray[Any], negative: NDArray[Any]) -> LayerScore:
        """Score projections, which are 0 at the midpoint.

        Args:
            positive, negative: the projections of each class, [rows].
        """
        positive, negative = positive.astype(np.float64), negative.astype(np.float64)
        others = np.sort(negative)
        # A tie counts as half a win.
        below = np.searchsorted(others, positive, "left") + np.searchsorted(
            others, positive, "right"
        )
        right = np.concatenate([positive > 0, negative < 0])
        spread = np.sqrt((_variance(positive) + _variance(negative)) / 2)
        gap = positive.mean() - negative.mean()
        # Where no class varies, what is left of a difference is the rounding of float64.
        spread = max(spread, abs(gap) * np.finfo(np.float64).eps)
        return LayerScore(
            auc=float(below.mean() / (2 * len(others))),
            accuracy=float(right.mean()),
            d_prime=float(gap / spread) if spread > 0 else 0.0,
        )

    def with_errors(
        self, both: Sequence[NDArray[Any]], folds: Sequence[NDArray[np.int64]]
    ) -> LayerScore:
        """Return these scores with their standard errors over the folds of a cross-validation.

        Args:
            both: the projections of the positives and of the negatives, [rows] each.
            folds: the fold of each row, likewise.
        """
        names, rest = np.unique(np.concatenate(folds)), []
        for fold in names:
            kept = [rows[of_rows != fold] for rows, of_rows in zip(both, folds, strict=True)]
            if not all(map(len, kept)):
                return self
            left = LayerScore.of(*kept)
            rest.append((left.auc, left.accuracy, left.d_prime))
        spread = np.var(rest, axis=0) * (len(names) - 1)
        return replace(self, **dict(zip(ERRORS, np.sqrt(spread).tolist(), strict=True)))


def _variance(values: NDArray[np.float64]) -> float:
    """Return the unbiased variance; 0 for a single value."""
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0
