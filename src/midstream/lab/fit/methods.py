"""Methods that find a direction between two classes, of any length and sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit.moments import Floats, Moments
from midstream.plan.classifiers.linear_classifier import read_linear
from midstream.validation import kind, read_word

METHODS = ("mean", "pca", "lat", "logistic", "lda")
SHRINKAGE = 0.1
_MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class TrainingSet:
    """What a method sees of the training rows of one layer."""

    positive: Moments  # with scatter for `lda` without rows
    negative: Moments
    differences: Moments | None = None  # of pairs, for `pca` and `lat` without rows
    rows: tuple[Floats, Floats] | None = None  # float64 [n, width] of each class; None: not kept
    signs: Floats | None = None  # float64 [pairs], 1 or −1, of each pair's difference in `rows`


@dataclass(frozen=True)
class Method:
    """A method, by its name or by a classifier."""

    name: str  # one of `METHODS`, or the class of the classifier
    classifier: Any = None  # unfitted, of scikit-learn; None: the method needs none

    @staticmethod
    def read(value: object) -> Method:
        """Read a name, or an unfitted linear classifier of scikit-learn."""
        if not isinstance(value, str):
            if not hasattr(value, "fit"):
                raise SpecError(
                    "",
                    f"expected one of {', '.join(METHODS)}, or a linear classifier of scikit-learn,"
                    f" got {kind(value)}",
                )
            return Method(type(value).__name__, value)
        name = read_word(value, METHODS)
        return Method(name, _logistic() if name == "logistic" else None)

    @property
    def needs_pairs(self) -> bool:
        """Whether row i of one class is compared with row i of the other."""
        return self.name in ("pca", "lat")

    @property
    def needs_scatter(self) -> bool:
        """Whether moments of second order replace the rows."""
        return self.name in ("pca", "lat", "lda")

    def direction(self, training: TrainingSet) -> Floats:
        """Return the direction, float64 [width], of any length and sign."""
        if self.classifier is not None:
            assert training.rows is not None
            return _classified(self.classifier, *training.rows)
        if self.needs_pairs:
            return _largest_axis(training)
        between = training.positive.mean - training.negative.mean
        return between if self.name == "mean" else _discriminant(training, between)


def _largest_axis(training: TrainingSet) -> Floats:
    """Return the first principal component of the pairs' differences, less their mean."""
    if training.rows is None:
        assert training.differences is not None
        assert training.differences.scatter is not None
        return _top_eigenvector(training.differences.scatter)
    assert training.signs is not None
    differences = (training.rows[0] - training.rows[1]) * training.signs[:, None]
    centred = differences - differences.mean(0)
    if len(centred) >= centred.shape[1]:
        return _top_eigenvector(centred.T @ centred)
    axis: Floats = centred.T @ _top_eigenvector(centred @ centred.T)
    return axis


def _top_eigenvector(matrix: Floats) -> Floats:
    eigenvector: Floats = np.linalg.eigh(matrix)[1][:, -1]
    return eigenvector


def _discriminant(training: TrainingSet, between: Floats) -> Floats:
    """Return S⁻¹ · between, with S = 0.9 · C + 0.1 · mean(diag C) · I, C the covariance within."""
    count = training.positive.count + training.negative.count
    width = len(between)
    if training.rows is not None:
        centred = np.concatenate([rows - rows.mean(0) for rows in training.rows])
        ridge = SHRINKAGE * float(np.square(centred).sum()) / count / width
        if ridge == 0:
            return between
        # (ridge · I + a · XᵀX)⁻¹ by a system of the size of the rows, which are fewer.
        a = (1 - SHRINKAGE) / count
        inner = centred @ centred.T + (ridge / a) * np.eye(len(centred))
        kept: Floats = (between - centred.T @ np.linalg.solve(inner, centred @ between)) / ridge
        return kept
    assert training.positive.scatter is not None
    assert training.negative.scatter is not None
    within = (training.positive.scatter + training.negative.scatter) / count
    ridge = SHRINKAGE * float(np.trace(within)) / width
    if ridge == 0:
        return between
    within *= 1 - SHRINKAGE
    within[np.diag_indices(width)] += ridge
    return np.linalg.solve(within, between).astype(np.float64, copy=False)


def _logistic() -> Any:
    MissingExtraError.require("sklearn", 'method="logistic"')
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=_MAX_ITERATIONS))


def _classified(classifier: Any, positive: NDArray[Any], negative: NDArray[Any]) -> Floats:
    from sklearn.base import clone

    labels = np.repeat([1, 0], [len(positive), len(negative)])
    fitted = clone(classifier).fit(np.concatenate([positive, negative]), labels)
    return read_linear(fitted)[0]
