"""What fits a probe: classifiers of scikit-learn, by name or as they are given, and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.attention import AttentionFit
from midstream.lab.fit.probes.labelled_rows import LabelledRows, least_groups
from midstream.plan.classifiers.classes import Classes
from midstream.plan.probe import Probe
from midstream.validation import kind, read_word

KINDS = ("linear", "logistic", "mlp", "attention")
OF_CLASSES = ("linear", "logistic")
# Regularisation of "logistic", of which the one with the least held-out loss is taken.
_INVERSE_PENALTIES = tuple(10.0**power for power in range(-4, 2))
_INNER_FOLDS, _HIDDEN, _MAX_ITERATIONS = 3, 16, 5000
# Numbers up to which several threads take longer than one, on processors that are shared.
_ONE_THREAD = 1 << 22


@dataclass(frozen=True)
class Estimator:
    """A kind of probe.

    Attributes:
        name: one of `KINDS`, or the class of the classifier.
        classifier: unfitted, of scikit-learn, or an `AttentionFit`; None: that of the kind.
    """

    name: str
    classifier: Any = None

    @staticmethod
    def read(value: object) -> Estimator:
        """Read the name of a kind, or an unfitted classifier."""
        MissingExtraError.require("sklearn", "Probe.fit")
        if isinstance(value, str):
            name = read_word(value, KINDS)
            return Estimator(name, AttentionFit() if name == "attention" else None)
        if isinstance(value, AttentionFit):
            return Estimator("attention", value)
        if not hasattr(value, "fit"):
            named = ", ".join(KINDS)
            raise SpecError(
                "", f"expected one of {named}, or a classifier of scikit-learn, got {kind(value)}"
            )
        return Estimator(type(value).__name__, value)

    @property
    def scaler(self) -> str:
        """The scaler that the weights contain."""
        return "StandardScaler" if self.name in KINDS else ""

    @property
    def reads_texts(self) -> bool:
        """Whether its score is of a text, whose rows it weighs itself."""
        return isinstance(self.classifier, AttentionFit)

    def fit(self, data: LabelledRows, seed: int) -> tuple[Probe, dict[str, Any]]:
        """Return the probe that is fitted to all rows, and what was chosen on the way."""
        from threadpoolctl import threadpool_limits  # scikit-learn brings it

        classes = data.labels.classes
        if len(classes) > 2 and self.name not in OF_CLASSES:
            known = " and ".join(OF_CLASSES)
            problem = f"{self.name} tells two classes, got {len(classes)}; use {known} for more"
            raise SpecError("kind", problem)
        with threadpool_limits(1 if data.rows.size <= _ONE_THREAD else None):
            if isinstance(self.classifier, AttentionFit):
                return self.classifier.fit(data, seed)
            model, chosen = self._fitted(data, seed)
        layers = data.layers[0] if len(data.layers) == 1 else list(data.layers)
        probe = Probe.from_sklearn(model, layer=layers, site=data.site)
        if probe.classes is not None:
            named = Classes(probe.classes.weights, probe.classes.bias, classes)
            probe = probe.replace(classes=named, link="softmax")
        return probe, chosen

    def _fitted(self, data: LabelledRows, seed: int) -> tuple[Any, dict[str, Any]]:
        from sklearn.base import clone

        rows, labels = data.rows.astype(np.float64), data.row_labels
        if self.name == "logistic":
            return _logistic(rows, labels, data.groups[data.owners], seed)
        model = self.classifier
        if model is None:
            model = _pipeline(_discriminant() if self.name == "linear" else _network(seed))
        return clone(model).fit(rows, labels), {}


def _pipeline(last: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), last)


def _discriminant() -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")


def _network(seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(
        (_HIDDEN,), solver="lbfgs", alpha=1.0, max_iter=_MAX_ITERATIONS, random_state=seed
    )


def _logistic(rows: Any, labels: Indices, groups: Indices, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fit a logistic regression whose penalty is chosen by a cross-validation of whole groups."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold

    least = least_groups(labels, groups)
    if least < 2:
        raise SpecError("labels", "expected at least 2 texts, or groups, of each class to fit to")
    folds = StratifiedGroupKFold(min(_INNER_FOLDS, least), shuffle=True, random_state=seed)
    search = GridSearchCV(
        _pipeline(LogisticRegression(max_iter=_MAX_ITERATIONS)),
        {"logisticregression__C": _INVERSE_PENALTIES},
        scoring="neg_log_loss",
        cv=list(folds.split(rows, labels, groups)),
        error_score="raise",
    )
    search.fit(rows, labels)
    return search.best_estimator_, {"C": search.best_params_["logisticregression__C"]}
