"""Weights of scikit-learn's linear classifiers, read without importing scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.classifiers.classes import MOST_CHARACTERS
from midstream.validation import kind, listed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Their decision_function is ⟨h, coef_⟩ + intercept_.
CLASSIFIERS = (
    "LogisticRegression",
    "LogisticRegressionCV",
    "LinearDiscriminantAnalysis",
    "RidgeClassifier",
    "RidgeClassifierCV",
    "LinearSVC",
)
_SCALER, _PIPELINE = "StandardScaler", "Pipeline"


def read_linear(classifier: object) -> tuple[NDArray[np.float64], float]:
    """Return float64 [width] and intercept of a fitted binary classifier; see `read_outputs`."""
    weights, biases, _ = read_outputs(classifier)
    if len(weights) > 1:
        raise SpecError(
            "",
            f"expected two classes, got {len(weights)}; fit one classifier for each class against "
            "the others",
        )
    return weights[0], float(biases[0])


def read_outputs(
    classifier: object,
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str] | None]:
    """Return float64 [n, width] and [n] of a fitted classifier, with a `Pipeline`'s scalers folded
    in: h @ weights.T + biases = `decision_function(h)`. n is 1 for two classes, else one for each,
    with their names; None: they cannot be names of a probe's classes.
    """
    import numpy as np

    *scalers, last = steps_of(classifier)
    name = name_of(last)
    if name not in CLASSIFIERS:
        raise SpecError(
            "",
            f"expected one of scikit-learn's {listed(CLASSIFIERS)}, or a `Pipeline` of "
            f"`{_SCALER}` and one of these, got {kind(last)}",
        )
    model: Any = last
    if not hasattr(model, "coef_"):
        raise SpecError("", f"`{name}` is not fitted; call fit first")
    # [1, width], or [width] of newer RidgeClassifiers.
    weights = np.atleast_2d(np.asarray(model.coef_, np.float64))
    count = len(model.classes_)
    rows = 1 if count == 2 else count
    if count < 2 or weights.ndim != 2 or len(weights) != rows:
        raise SpecError(
            "",
            "expected `coef_` [1, width] of two classes, or [classes, width] of more, got "
            f"{count} classes with `coef_` {list(weights.shape)}",
        )
    biases = np.broadcast_to(np.asarray(model.intercept_, np.float64).reshape(-1), rows)
    weights, biases = unscaled(scalers, weights, biases)
    return weights, biases, names_of(model.classes_)


def names_of(labels: Any) -> list[str] | None:
    """Return labels as names of classes; None: they cannot be names."""
    names = [str(label) for label in labels]
    usable = all(0 < len(name) <= MOST_CHARACTERS and name.isprintable() for name in names)
    return names if usable and len({*names}) == len(names) else None


def unscaled(
    scalers: Sequence[Any], rows: NDArray[np.float64], biases: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [n, width] and biases [n] for unscaled vectors, from those for scaled ones."""
    import numpy as np

    for scaler in reversed(scalers):
        if not hasattr(scaler, "n_features_in_"):
            raise SpecError("", f"`{_SCALER}` is not fitted; call fit first")
        if scaler.with_std:
            rows = rows / np.asarray(scaler.scale_, np.float64)
        if scaler.with_mean:
            biases = biases - rows @ np.asarray(scaler.mean_, np.float64)
    return rows, biases


def steps_of(classifier: Any) -> list[Any]:
    if name_of(classifier) != _PIPELINE:
        return [classifier]
    steps = [step for _, step in classifier.steps if step not in (None, "passthrough")]
    for step in steps[:-1]:
        if name_of(step) != _SCALER:
            raise SpecError(
                "", f"a `Pipeline` may have `{_SCALER}` before its classifier, got {kind(step)}"
            )
    if not steps:
        raise SpecError("", "the `Pipeline` has no steps")
    return steps


def name_of(value: object) -> str:
    """Return the name of scikit-learn's class; "" of any other, subclasses included."""
    value_class = type(value)
    return value_class.__name__ if value_class.__module__.partition(".")[0] == "sklearn" else ""
