"""Statistics of held-out scores, against scikit-learn, SciPy and formulas that are written out."""

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, norm
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve
from unit.viz.drawn import drawn

from midstream.errors import SpecError
from midstream.lab.fit import FittedProbe
from midstream.lab.fit.probes.calibration import calibration_of, cross_fitted
from midstream.lab.fit.probes.intervals import auc_of, rate_of
from midstream.lab.fit.probes.rates import threshold_for

TEXTS, WIDTH = 120, 6


def fitted(seed=0, strength=0.7, **options):
    made = np.random.default_rng(seed)
    labels = np.tile([0, 1], TEXTS // 2)
    rows = made.normal(size=(TEXTS, WIDTH)) + strength * labels[:, None]
    return FittedProbe.from_rows(rows, labels, "linear", layer=0, **options), rows


@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([0.8, 0.95, 0.99]))
def test_a_rate_has_the_interval_of_clopper_and_pearson(count, total, confidence):
    count = min(count, total)
    found = rate_of(np.arange(total) < count, confidence)
    tail = (1 - confidence) / 2
    low = beta.ppf(tail, count, total - count + 1) if count else 0.0
    high = beta.ppf(1 - tail, count + 1, total - count) if count < total else 1.0
    assert found.value == count / total
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    # That is: as many, or as few, have the probability of a tail.
    if count < total:
        rest = 1 - found.high
        chances = [comb(total, k) * found.high**k * rest ** (total - k) for k in range(count + 1)]
        assert sum(chances) == pytest.approx(tail, abs=1e-9)


few = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(few, few, st.sampled_from([0.8, 0.95]))
@settings(deadline=None)
def test_an_area_is_scikit_learns_and_its_interval_solves_newcombes_equation(upper, lower, level):
    found = auc_of(np.array(upper), np.array(lower), level)
    labels = [1] * len(upper) + [0] * len(lower)
    assert found.value == pytest.approx(roc_auc_score(labels, upper + lower), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    z = norm.ppf((1 + level) / 2)
    extra = (len(upper) + len(lower)) / 2 - 1
    for end in (found.low, found.high):
        if 0 < end < 1:
            spread = 1 + extra * (1 - end) / (2 - end) + extra * end / (1 + end)
            error = np.sqrt(end * (1 - end) * spread / (len(upper) * len(lower)))
            assert abs(end - found.value) == pytest.approx(z * error, abs=1e-6)
    assert (found.low > 0) == (found.value > 0)
    assert (found.high < 1) == (found.value < 1)


def test_the_interval_of_an_area_has_the_true_one_as_often_as_it_says():
    made, true = np.random.default_rng(0), norm.cdf(1.2 / np.sqrt(2))
    inside = 0
    for _ in range(400):
        found = auc_of(made.normal(1.2, 1, 30), made.normal(0, 1, 40), 0.95)
        inside += found.low <= true <= found.high
    assert 0.92 <= inside / 400 <= 0.985, inside


scores = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=60)


@given(scores, scores, st.integers(1, 90).map(lambda percent: percent / 100))
def test_a_threshold_is_the_lowest_that_no_more_negatives_reach(negative, positive, fpr):
    values = np.array(negative + positive)
    labels = np.repeat([0, 1], [len(negative), len(positive)])
    if len(negative) < 1 / fpr - 1e-6:
        needed = next(n for n in range(1, 200) if n * fpr >= 1 - 1e-9)
        with pytest.raises(SpecError, match=f"fpr: .*needs at least {needed} held-out negatives"):
            threshold_for(values, labels, fpr)
        return
    found = threshold_for(values, labels, fpr)
    reached = np.array(negative) >= found
    assert reached.mean() <= fpr + 1e-9
    # A lower one is reached by the next negatives as well, which are too many.
    below = np.array([score for score in negative if score < found])
    if len(below):
        assert (np.array(negative) >= below.max()).mean() > fpr - 1e-9
    # And a rounding of float32 changes nothing: no score is next to it.
    assert np.abs(values - found).min() > 1e-4 or found == values.min()


def test_the_interval_of_the_rate_at_a_chosen_threshold_has_the_true_rate():
    """The negatives that are counted have chosen the threshold too."""
    made, inside = np.random.default_rng(1), 0
    for _ in range(200):
        negative = made.normal(size=200)
        values = np.concatenate([negative, made.normal(2, 1, 200)])
        found = threshold_for(values, np.repeat([0, 1], 200), 0.05)
        interval = rate_of(negative >= found, 0.95)
        inside += interval.low <= norm.sf(found) <= interval.high
    assert inside / 200 >= 0.94, inside


def test_a_choice_has_the_rates_of_held_out_texts_and_says_how_many_are_needed():
    found, _ = fitted()
    chosen = found.threshold(0.05, confidence=0.9)
    negative, positive = (found.scores[found.labels == label] for label in (0, 1))
    assert chosen.num_negatives == 60
    assert chosen.fpr.value == (negative >= chosen.value).mean() == 3 / 60
    assert chosen.tpr.value == (positive >= chosen.value).mean()
    assert chosen.fpr.high == pytest.approx(beta.ppf(0.95, 4, 57), abs=1e-9)
    assert chosen.probe.info.threshold == float(chosen) == chosen.value
    assert chosen.probe.info.scores["tpr_low"] == chosen.tpr.low
    assert chosen.probe == found.probe
    assert "90% intervals; target 0.05" in str(chosen)
    with pytest.raises(SpecError, match=r"0.01 needs at least 100 held-out .*there are 60"):
        found.threshold(0.01)
    assert found.threshold(1 / 60).fpr.value == 1 / 60


def test_the_roc_curve_is_scikit_learns_and_is_drawn():
    found, _ = fitted()
    roc = found.roc()
    wanted = roc_curve(found.labels, found.scores, drop_intermediate=False)
    for mine, theirs in zip((roc.fpr, roc.tpr, roc.thresholds), wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.trapezoid(roc.tpr, roc.fpr) == pytest.approx(roc.auc.value)
    assert roc.auc == found.auc
    panel = drawn(roc)
    assert panel.titles == ("false positive rate", "true positive rate")
    line = panel.lines["probe"]
    for rate, at in zip(line, np.linspace(0, 1, len(line)), strict=True):
        assert rate == roc.tpr[roc.fpr <= at].max()


def of_scores(values, labels, method):
    """scikit-learn's calibrated probabilities of a classifier whose decisions are the scores."""
    model = LogisticRegression().fit(np.array([[-1.0], [1.0]]), [0, 1])
    model.coef_, model.intercept_ = np.ones((1, 1)), np.zeros(1)
    calibrated = CalibratedClassifierCV(FrozenEstimator(model), method=method, ensemble=False)
    calibrated.fit(values[:, None], labels)
    return lambda other: calibrated.predict_proba(other[:, None])[:, 1]


@pytest.mark.parametrize("method", ["isotonic", "sigmoid"])
def test_probabilities_are_scikit_learns(method):
    found, _ = fitted()
    values, labels = 3 * found.scores - 40, found.labels
    wanted = of_scores(values, labels, method)
    grid = np.linspace(values.min() - 9, values.max() + 9, 99)
    np.testing.assert_allclose(
        calibration_of(values, labels, method)(grid), wanted(grid), rtol=2e-4, atol=2e-5
    )


@pytest.mark.parametrize("options", [{}, {"held_out": 0.5}])
@pytest.mark.parametrize("method", ["isotonic", "sigmoid"])
def test_a_report_is_of_probabilities_of_texts_that_the_map_was_not_fitted_on(method, options):
    found, rows = fitted(**options)
    report = found.calibrate(method)
    assert len(report.probabilities) == len(found.texts)
    folds = found.folds
    if not options:  # the folds of the fit
        for fold in range(5):
            rest = folds != fold
            mapped = calibration_of(found.scores[rest], found.labels[rest], method)
            np.testing.assert_allclose(
                report.probabilities[~rest], mapped(found.scores[~rest]), rtol=1e-9
            )
    shares, labels = report.probabilities, found.labels
    assert report.brier == pytest.approx(np.mean((shares - labels) ** 2))
    assert report.brier == pytest.approx(brier_score_loss(labels, shares))
    places = np.minimum((shares * 10).astype(int), 9)
    gaps = [
        abs(labels[places == place].mean() - shares[places == place].mean())
        * np.mean(places == place)
        for place in set(places.tolist())
    ]
    assert report.ece == pytest.approx(sum(gaps))
    assert sum(part.count for part in report.bins) == len(shares)
    for part, place in zip(report.bins, sorted(set(places.tolist())), strict=True):
        assert part.observed == rate_of(labels[places == place] == 1, 0.95)
    known = report.fitted.info
    assert known.calibration == calibration_of(found.scores, labels, method)
    assert (known.scores["brier"], known.scores["ece"]) == (report.brier, report.ece)
    probability = report.fitted.predict_proba(rows)
    np.testing.assert_allclose(probability.sum(1), 1)
    np.testing.assert_allclose(probability[:, 1], known.calibration(found.decision_function(rows)))
    assert f"Brier {report.brier:.4f}" in str(report)
    assert drawn(report).titles == ("probability", "share of positives")


def test_a_map_that_has_seen_the_texts_would_look_better_than_it_is():
    """Labels that nothing tells: isotonic maps of the same texts find an order."""
    made = np.random.default_rng(0)
    values, labels = made.normal(size=200), np.tile([0, 1], 100)
    seen = calibration_of(values, labels, "isotonic")(values)
    unseen = cross_fitted(values, labels, np.arange(200) % 5, "isotonic")
    assert np.mean((seen - labels) ** 2) < 0.25 < np.mean((unseen - labels) ** 2)


def test_rates_by_slice_are_those_of_the_texts_of_a_slice():
    found, _ = fitted(held_out=0.5)
    values = ["news", "chat", "chat", None] * (TEXTS // 4)
    chosen = found.threshold(0.1)
    table = found.by_slice(values, chosen)
    mine = np.array([values[text] for text in found.texts], object)
    assert [part.value for part in table] == list(dict.fromkeys(mine.tolist()))
    for part in table:
        here = np.array([value == part.value for value in mine])
        positive = found.scores[here & (found.labels == 1)]
        negative = found.scores[here & (found.labels == 0)]
        assert (part.num_texts, part.num_positives) == (here.sum(), len(positive))
        assert part.fpr == rate_of(negative >= chosen.value, 0.95)
        assert part.tpr == rate_of(positive >= chosen.value, 0.95)
        np.testing.assert_equal(part.auc, auc_of(positive, negative, 0.95))
    assert table["chat"].num_texts == sum(value == "chat" for value in mine)
    alike = found.by_slice(np.arange(TEXTS).tolist())
    assert np.isnan(alike.slices[0].auc.value)
    assert table.threshold == chosen.value
    assert str(table).splitlines()[0].split() == [
        "slice",
        "texts",
        "positives",
        "AUC",
        "FPR",
        "TPR",
    ]
    with pytest.raises(SpecError, match="expected one of 'news'|'chat'|None"):
        table["mail"]


def test_a_learning_curve_ends_at_the_fit_itself_and_rises_with_what_there_is_to_learn():
    found, _ = fitted(strength=0.5)
    curve = found.learning_curve([96, 4, 24])
    assert curve.sizes == (4, 24, 96)
    assert curve.aucs[-1].value == pytest.approx(found.auc.value, abs=1e-9)
    assert curve.aucs[0].value < curve.aucs[2].value
    assert found.learning_curve().sizes[-1] == 96
    assert drawn(curve).titles == ("texts fitted", "AUC")
    assert str(curve).splitlines()[1].startswith("4 ")
