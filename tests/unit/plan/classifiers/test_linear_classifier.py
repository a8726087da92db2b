"""Probes of scikit-learn's classifiers, against their own decision functions."""

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import (
    LogisticRegression,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDClassifier,
)
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC
from support.refusals import refused

from midstream import Probe
from midstream.errors import SpecError
from midstream.plan.scores.rule import NO_TOKENS

ROWS = np.random.default_rng(0).normal(size=(60, 5)) * [1, 2, 3, 0.1, 5] + 2
LABELS = np.array(["no", "yes"])[(ROWS[:, 0] + ROWS[:, 3] > 4).astype(int)]
CLASSIFIERS = [
    LogisticRegression(),
    LogisticRegression(fit_intercept=False),
    LinearDiscriminantAnalysis(),
    LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    RidgeClassifier(),
    RidgeClassifierCV(),
    LinearSVC(),
    LinearSVC(fit_intercept=False),
    make_pipeline(StandardScaler(), LogisticRegression()),
    make_pipeline(StandardScaler(with_mean=False), StandardScaler(), RidgeClassifier()),
    make_pipeline(StandardScaler(with_std=False), LinearSVC()),
    Pipeline([("none", "passthrough"), ("last", LinearDiscriminantAnalysis())]),
]


def test_a_probe_scores_as_the_decision_function() -> None:
    for classifier in CLASSIFIERS:
        classifier.fit(ROWS, LABELS)
        probe = Probe.from_sklearn(classifier, layer=3, name="yes", positions="prompt")
        scores = ROWS @ probe.direction.numpy().astype("f8") + probe.bias
        expected = classifier.decision_function(ROWS)
        np.testing.assert_allclose(scores, expected, atol=1e-5, err_msg=repr(classifier))
        assert (probe.layers.indices, probe.name) == ((3,), "yes")


@pytest.mark.parametrize("labels", [np.array(list("abc"))[np.arange(60) % 3], np.arange(60) % 4])
def test_a_probe_of_several_classes_scores_as_the_classifier(labels) -> None:
    for classifier in CLASSIFIERS:
        classifier.fit(ROWS, labels)
        probe = Probe.from_sklearn(classifier, layer=3, name="several")
        logits = ROWS @ np.stack([row.numpy() for row in probe.classes.weights]).astype("f8").T
        logits += probe.classes.bias.numpy()
        expected = classifier.decision_function(ROWS)
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=repr(classifier))
        assert probe.classes.names == tuple(map(str, classifier.classes_))
        if hasattr(classifier, "predict_proba"):
            rule = probe.replace(link="softmax").rule
            _, shares = rule.follow(NO_TOKENS, logits.astype(np.float32))
            np.testing.assert_allclose(shares, classifier.predict_proba(ROWS), atol=1e-5)


def test_what_is_no_fitted_linear_classifier_is_rejected() -> None:
    multi = RidgeClassifier().fit(ROWS, np.stack([np.arange(60) % 2, np.arange(60) % 3 > 1], 1))

    class Own(LogisticRegression):
        """Its decision function may be any."""

    refused(
        lambda classifier: Probe.from_sklearn(classifier, 3),
        (LogisticRegression(), "classifier: `LogisticRegression` is not fitted"),
        (multi, r"expected `coef_` \[1, width\] of two classes.* `coef_` \[2, 5\]"),
        (SVC(kernel="linear").fit(ROWS, LABELS), "expected one of scikit-learn's .*, got `SVC`"),
        (SGDClassifier().fit(ROWS, LABELS), "got `SGDClassifier`"),
        (Own().fit(ROWS, LABELS), "got `Own`"),
        (make_pipeline(MinMaxScaler(), LinearSVC()), "before its classifier, got `MinMaxScaler`"),
        (make_pipeline(StandardScaler(), LinearSVC()), "`LinearSVC` is not fitted"),
        (StandardScaler().fit(ROWS), "got `StandardScaler`"),
        ([1.0], "got `list`"),
    )


def test_a_classifier_of_joined_layers_has_one_row_for_each() -> None:
    joined = np.hstack([ROWS, ROWS[::-1] * 2])
    classifier = make_pipeline(StandardScaler(), LogisticRegression()).fit(joined, LABELS)
    probe = Probe.from_sklearn(classifier, layer=[7, 2])
    rows = np.stack([row.numpy() for row in probe.direction]).astype("f8")
    scores = joined[:, :5] @ rows[0] + joined[:, 5:] @ rows[1] + probe.bias
    np.testing.assert_allclose(scores, classifier.decision_function(joined), atol=1e-5)
    with pytest.raises(SpecError, match="classifier: it has 10 weights, which 3 layers cannot"):
        Probe.from_sklearn(classifier, layer=[1, 2, 3])


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_a_network_of_several_classes_scores_as_the_classifier() -> None:
    labels = np.array(list("abc"))[np.arange(60) % 3]
    network = MLPClassifier((7,), "tanh", max_iter=50, random_state=0)
    classifier = make_pipeline(StandardScaler(), network).fit(ROWS, labels)
    probe = Probe.from_sklearn(classifier, layer=3, name="several").replace(link="softmax")
    assert probe.classes.names == ("a", "b", "c")
    weights = np.stack([row.numpy() for row in probe.hidden.weights]).astype("f8")
    sums = (ROWS @ weights.T + probe.hidden.bias.numpy()).astype(np.float32)
    _, shares = probe.rule.follow(NO_TOKENS, sums)
    np.testing.assert_allclose(shares, classifier.predict_proba(ROWS), atol=1e-5)


@pytest.mark.parametrize("activation", ["ReLU", "GELU", "Tanh", "SiLU"])
def test_a_module_of_several_outputs_scores_as_it(activation) -> None:
    import torch
    from torch import nn

    module = nn.Sequential(nn.Linear(4, 6), getattr(nn, activation)(), nn.Linear(6, 3))
    probe = Probe.from_torch(module, layer=1)
    rows = torch.randn(8, 4)
    weights = torch.from_numpy(np.stack([row.numpy() for row in probe.hidden.weights]))
    sums = rows @ weights.T + torch.from_numpy(probe.hidden.bias.numpy())
    _, scores = probe.rule.follow(NO_TOKENS, sums.numpy())
    np.testing.assert_allclose(scores, module(rows).detach(), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_a_network_that_is_no_small_binary_one_is_rejected() -> None:
    labels = np.stack([np.arange(60) % 2, np.arange(60) % 3 > 1], 1)
    logistic = MLPClassifier((4,), "logistic", max_iter=2).fit(ROWS, LABELS)
    refused(
        lambda classifier: Probe.from_sklearn(classifier, layer=1),
        (MLPClassifier((4,)), "classifier: `MLPClassifier` is not fitted"),
        (MLPClassifier((4, 4), max_iter=2).fit(ROWS, LABELS), "expected one hidden layer, got 2"),
        (MLPClassifier((4,), max_iter=2).fit(ROWS, labels), "one class for each row, got several"),
        (logistic, "classifier: expected activation .*'logistic'"),
    )


def test_a_module_that_is_no_small_network_is_rejected() -> None:
    import torch
    from torch import nn

    class Own(nn.Sequential):
        pass

    refused(
        lambda module: Probe.from_torch(module, layer=1),
        (nn.Bilinear(4, 4, 1), "module: .*got `Bilinear`"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), "got `Sequential` of"),
        (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 1)), "'Sigmoid'"),
        (nn.Sequential(nn.Linear(4, 3), nn.GELU("tanh"), nn.Linear(3, 1)), "by tanh"),
        (Own(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), "got `Own`"),
    )
    linear = nn.Sequential(nn.Dropout(), nn.Linear(4, 3))
    probe = Probe.from_torch(linear, layer=1)
    rows = torch.randn(5, 4)
    logits = rows.numpy() @ np.stack([row.numpy() for row in probe.classes.weights]).T
    logits += probe.classes.bias.numpy()
    np.testing.assert_allclose(logits, linear.eval()(rows).detach(), atol=1e-6)
    alone = Probe.from_torch(nn.Linear(4, 1, bias=False), layer=1)
    assert (alone.classes, alone.direction.size, alone.bias) == (None, 4, 0.0)
    bare = nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.SiLU(), nn.Dropout(), nn.Linear(3, 1, bias=False)
    )
    assert Probe.from_torch(bare, layer=1).bias == 0.0
