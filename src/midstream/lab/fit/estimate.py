"""The direction of one layer, and its scores on held-out rows.

Rows are kept where a classifier needs them, or where they are fewer than their width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.lab.fit.folds import Folds
from midstream.lab.fit.methods import Method, TrainingSet
from midstream.lab.fit.moments import Floats, Moments, together
from midstream.lab.fit.samples import Samples
from midstream.lab.fit.scores import LayerScore

_Both = tuple[Samples, Samples]
"""The rows of the positive and of the negative class."""


@dataclass(frozen=True)
class Estimate:
    """One layer's direction."""

    vector: Floats  # float64 [width]; as long as the class means are apart along it
    midpoint: Floats  # float64 [width], between the class means
    score: LayerScore | None = None  # None: no rows were held out

    def project(self, rows: NDArray[Any]) -> Floats:
        """Project rows [n, width]: −1 is the negative class mean, 1 the positive; [n]."""
        half_gap = float(self.vector @ self.vector) / 2
        if half_gap == 0:
            return np.zeros(len(rows))  # the class means are equal: nothing is separated
        projections: Floats = (rows.astype(np.float64) - self.midpoint) @ self.vector / half_gap
        return projections


def estimate(
    positive: Samples, negative: Samples, layer: int, method: Method, folds: Folds, seed: int
) -> Estimate:
    """Estimate one layer's direction from all rows, and score it; `seed` is for `lat`."""
    samples, count = (positive, negative), len(positive) + len(negative)
    training_data: _Kept | _Accumulated
    if method.classifier is not None or (method.needs_scatter and count <= positive.width):
        training_data = _Kept(samples, layer, method, folds, seed)
    else:
        training_data = _Accumulated(samples, layer, method, folds, seed)
    whole = _oriented(method, training_data.training(None))
    if not folds.count:
        return whole
    parts = [_oriented(method, training_data.training(fold)) for fold in range(folds.count)]
    fold_numbers = folds.positive, folds.negative
    held_out = [
        np.concatenate(
            [_project(parts, rows, fold_of) for rows, fold_of in _aligned(mine, layer, fold)]
        )
        for mine, fold in zip(samples, fold_numbers, strict=True)
    ]
    score = LayerScore.of(*held_out).with_errors(held_out, fold_numbers)
    return Estimate(whole.vector, whole.midpoint, score)


def _oriented(method: Method, training: TrainingSet) -> Estimate:
    """Return a method's direction with positives higher, as long as the class means are apart."""
    upper, lower = training.positive.mean, training.negative.mean
    direction = method.direction(training)
    length = float(np.linalg.norm(direction))
    unit = direction / length if length > 0 else direction
    # As long as the class means are apart along it; the sign of that distance orients it.
    return Estimate(float((upper - lower) @ unit) * unit, (upper + lower) / 2)


def _project(parts: list[Estimate], rows: NDArray[Any], folds: NDArray[np.int64]) -> Floats:
    """Project each row onto the direction that was fitted without its fold."""
    projections = np.empty(len(rows))
    for fold in np.unique(folds):
        mine = folds == fold
        projections[mine] = parts[int(fold)].project(rows[mine])
    return projections


def _aligned(
    samples: Samples, layer: int, folds: NDArray[np.int64]
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yield the blocks of a layer with the folds of their rows."""
    start = 0
    for rows in samples.blocks(layer):
        yield rows, folds[start : start + len(rows)]
        start += len(rows)


def _signs(method: Method, count: int, seed: int) -> Floats:
    """Return the sign of each pair's difference: random for `lat`, else 1."""
    if method.name != "lat":
        return np.ones(count)
    return np.random.default_rng(seed).choice([-1.0, 1.0], count)


class _Kept:
    """All rows of one layer."""

    def __init__(self, both: _Both, layer: int, method: Method, folds: Folds, seed: int) -> None:
        self._rows = [
            np.concatenate([rows.astype(np.float64) for rows in samples.blocks(layer)])
            for samples in both
        ]
        self._folds = folds
        self._signs = _signs(method, len(both[0]), seed)

    def training(self, fold: int | None) -> TrainingSet:
        """Return the rows that are not in a fold; None: all rows."""
        kept = [
            np.ones(len(folds), np.bool_) if fold is None else folds != fold
            for folds in (self._folds.positive, self._folds.negative)
        ]
        rows = self._rows[0][kept[0]], self._rows[1][kept[1]]
        upper, lower = (Moments.of(class_rows, with_scatter=False) for class_rows in rows)
        return TrainingSet(upper, lower, rows=rows, signs=self._signs[kept[0]])


class _Accumulated:
    """Moments of the rows of one layer, for each fold."""

    def __init__(self, both: _Both, layer: int, method: Method, folds: Folds, seed: int) -> None:
        positive, negative = both
        count, width = max(folds.count, 1), positive.width
        empty = Moments(0, np.zeros(width))
        with_scatter = method.name == "lda"
        self._classes = [[empty] * count, [empty] * count]
        for mine, samples, fold_of in (
            (self._classes[0], positive, folds.positive),
            (self._classes[1], negative, folds.negative),
        ):
            for rows, row_folds in _aligned(samples, layer, fold_of):
                _add(mine, rows, row_folds, with_scatter)
        self._differences: list[Moments] | None = None
        if method.needs_pairs:
            self._differences = [empty] * count
            signs = _signs(method, len(positive), seed)
            blocks = zip(
                _aligned(positive, layer, folds.positive), negative.blocks(layer), strict=True
            )
            start = 0
            for (upper, row_folds), lower in blocks:
                sign = signs[start : start + len(upper), None]
                start += len(upper)
                rows = (upper.astype(np.float64) - lower.astype(np.float64)) * sign
                _add(self._differences, rows, row_folds, with_scatter=True)

    def training(self, fold: int | None) -> TrainingSet:
        """Return the moments of the rows that are not in a fold; None: of all rows."""
        first, second, *differences = [
            together([moments for index, moments in enumerate(parts) if index != fold])
            for parts in (*self._classes, *([self._differences] if self._differences else []))
        ]
        return TrainingSet(first, second, differences[0] if differences else None)


def _add(
    moments: list[Moments], rows: NDArray[Any], folds: NDArray[np.int64], with_scatter: bool
) -> None:
    for fold in np.unique(folds):
        moments[int(fold)] += Moments.of(rows[folds == fold], with_scatter)
