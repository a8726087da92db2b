"""Drift of scores, compared with NumPy in float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.drift import (
    MOST_BINS,
    DriftMonitor,
    DriftWindow,
    ScoreBins,
    Training,
    stability_index,
)
from midstream.errors import SpecError

BINS = ScoreBins((-1.0, 0.0, 2.5), (10, 20, 30, 40))
FINITE = st.floats(-1e6, 1e6)


def reference(expected, actual):
    """The index of two lists of counts, each bin with half a score more."""
    e, a = (np.asarray(counts, np.float64) + 0.5 for counts in (expected, actual))
    e, a = e / e.sum(), a / a.sum()
    return float(np.sum((a - e) * np.log(a / e)))


def counted(bins, scores):
    """Counts of scores by bin, of NumPy's histogram with infinite outer edges."""
    edges = [-np.inf, *bins.edges, np.inf]
    inside = [min(score, 1e300) for score in scores]  # the last bin of NumPy's is closed
    return np.histogram(inside, edges)[0].tolist()


@given(
    st.integers(2, 12).flatmap(
        lambda n: st.tuples(*(st.lists(st.integers(0, 9999), min_size=n, max_size=n),) * 2)
    )
)
def test_the_index_is_that_of_numpy(both):
    assert stability_index(*both) == pytest.approx(reference(*both), rel=1e-9, abs=1e-12)


def test_the_index_of_a_worked_example():
    # Shares 0.1, 0.2, 0.7 and 0.3, 0.3, 0.4, of so many scores that half of one is nothing.
    expected, actual = [10**9, 2 * 10**9, 7 * 10**9], [3 * 10**9, 3 * 10**9, 4 * 10**9]
    worked = 0.2 * math.log(3) + 0.1 * math.log(1.5) - 0.3 * math.log(4 / 7)
    assert stability_index(expected, actual) == pytest.approx(worked, rel=1e-6)


def test_an_empty_bin_has_a_finite_index_that_grows_with_the_scores_it_lacks():
    few = stability_index([10, 10], [20, 0])
    many = stability_index([1000, 1000], [2000, 0])
    assert 0 < few < many < math.inf


def test_scores_of_the_training_do_not_drift_and_shifted_ones_do():
    rng = np.random.default_rng(0)
    bins = ScoreBins.of_scores(rng.normal(size=5000))
    for shift, low, high in ((0.0, 0.0, 0.02), (0.3, 0.05, 0.2), (0.6, 0.25, 2.0)):
        window = DriftWindow(bins, scores=5000)
        for score in rng.normal(shift, size=5000):
            window.add(score)
        assert low <= window.psi() < high, shift


@given(st.lists(FINITE, min_size=1, max_size=300), st.integers(2, 20))
def test_quantile_bins_hold_every_score_and_agree_with_numpy(scores, bins):
    made = ScoreBins.of_scores(scores, bins)
    assert sum(made.counts) == len(scores)
    assert len(made.edges) <= bins - 1
    assert list(made.counts) == counted(made, scores)
    assert ScoreBins.parse(made.to_dict()) == made


def test_quantile_bins_without_ties_have_as_many_scores_each():
    assert ScoreBins.of_scores(range(1000)).counts == (100,) * 10


def test_a_bin_begins_with_its_edge():
    assert [BINS.bin_of(score) for score in (-math.inf, -1.0, -0.5, 0.0, 2.5, math.inf)] == [
        0, 1, 1, 2, 3, 3,
    ]  # fmt: skip


@settings(max_examples=50)
@given(st.lists(FINITE, min_size=30, max_size=60), st.integers(1, 25))
def test_a_window_of_scores_counts_the_last_ones_alone(scores, length):
    window = DriftWindow(BINS, scores=length, least=1)
    for index, score in enumerate(scores):
        window.add(score)
        last = counted(BINS, scores[max(0, index + 1 - length) : index + 1])
        assert list(window.counts) == last
        assert window.psi() == pytest.approx(reference(BINS.counts, last))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 40), FINITE), max_size=40))
def test_a_window_of_time_counts_what_is_not_older(steps):
    now = 0.0
    window = DriftWindow(BINS, seconds=60.0, least=1, clock=lambda: now)
    added = []
    for seconds, score in steps:
        now += seconds
        window.add(score)
        added.append((int(now), score))
        # Parts of a second: a score stays 59 to 60 seconds.
        alive = [score for second, score in added if second > int(now) - 60]
        assert list(window.counts) == counted(BINS, alive)
    now += 61
    assert window.counts == (0, 0, 0, 0)
    assert window.psi() is None


def test_each_guard_has_the_index_of_its_newest_version_until_it_is_deleted():
    now = 0.0
    monitor = DriftMonitor(least=2, clock=lambda: now)
    hour, last = Training(BINS), Training(BINS, scores=2, seconds=None)
    other = Training(ScoreBins((5.0,), (1, 1)), seconds=60.0)
    for guard, version, training, score in (
        ("a", 1, hour, 0.0), ("a", 1, hour, 0.0), ("b", 7, last, 0.0), ("b", 7, last, 3.0),
        ("b", 7, last, -3.0), ("few", 1, hour, 0.0),
    ):  # fmt: skip
        monitor.add(guard, version, training, score)
    assert monitor.indices() == {
        ("a", 1): pytest.approx(reference(BINS.counts, [0, 0, 2, 0])),
        ("b", 7): pytest.approx(reference(BINS.counts, [1, 0, 0, 1])),
    }
    for version in (2, 1, 2):
        monitor.add("a", version, other, 9.0)
    assert monitor.indices()["a", 2] == pytest.approx(reference([1, 1], [0, 2]))
    assert ("a", 1) not in monitor.indices()
    now = 100.0
    assert set(monitor.indices()) == {("b", 7)}, "the other has no score of the last minute"
    monitor.keep(["a", "unknown"])
    assert monitor.indices() == {}


@pytest.mark.parametrize("window", [{}, {"scores": 500}, {"seconds": 86400.0}])
def test_a_training_has_the_window_that_is_asked_for_and_else_an_hour(window):
    form = {**BINS.to_dict(), **window}
    training = Training.parse(form)
    assert training.to_dict() == form
    assert Training.parse(training) is training
    length = (training.scores, training.seconds)
    assert length == (window.get("scores"), window.get("seconds", None if window else 3600.0))


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"scores": 5, "seconds": 5}, "expected one of `scores` and `seconds`"),
        ({"scores": 0}, "scores: expected at least 1, got 0"),
        ({"scores": 2**21}, "scores: expected 1 to 1048576"),
        ({"scores": 1.5}, "scores: expected `int`"),
        ({"seconds": 0}, "seconds: expected more than 0, got 0"),
        ({"seconds": "1h"}, "seconds: expected a number"),
        ({"minutes": 5}, "unknown field 'minutes'"),
    ],
)
def test_a_wrong_window_is_rejected_by_its_field(window, message):
    with pytest.raises(SpecError, match=message):
        Training.parse({**BINS.to_dict(), **window})


def test_there_is_no_index_of_too_few_scores():
    window = DriftWindow(BINS, scores=10, least=3)
    indices = []
    for _ in range(3):
        window.add(0.0)
        indices.append(window.psi() is None)
    assert indices == [True, True, False]


def test_a_score_that_is_no_number_is_counted_apart():
    window = DriftWindow(BINS, scores=10, least=1)
    for score in (math.nan, math.inf, -math.inf):
        window.add(score)
    assert (window.counts, window.skipped) == ((1, 0, 0, 1), 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"edges": [0, 0], "counts": [1, 1, 1]}, r"edges\[1\]: expected more than 0"),
        ({"edges": [1, 0], "counts": [1, 1, 1]}, r"edges\[1\]: expected more than 1"),
        ({"edges": [math.inf], "counts": [1, 1]}, r"edges\[0\]: expected a finite number"),
        ({"edges": ["0"], "counts": [1, 1]}, r"edges\[0\]: expected a number"),
        ({"edges": [], "counts": [1]}, "edges: expected 1 to 255"),
        ({"edges": list(range(MOST_BINS)), "counts": [1]}, "edges: expected 1 to 255"),
        ({"edges": 3, "counts": [1, 1]}, "edges: expected a list of numbers"),
        ({"edges": [0], "counts": [1]}, "counts: expected 2 counts, one more than edges, got 1"),
        ({"edges": [0], "counts": [0, 0]}, "counts: expected counts of scores, got zeros"),
        ({"edges": [0], "counts": [1, -1]}, r"counts\[1\]: expected at least 0"),
        ({"edges": [0], "counts": [1, True]}, r"counts\[1\]: expected `int`"),
        ({"edges": [0]}, "missing field `counts`"),
    ],
)
def test_a_malformed_distribution_is_rejected_by_its_field(value, message):
    with pytest.raises(SpecError, match=message):
        ScoreBins.parse(value)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "expected one of `scores` and `seconds`"),
        ({"scores": 5, "seconds": 5}, "expected one of `scores` and `seconds`"),
        ({"scores": 0}, "scores: expected 1 to"),
        ({"seconds": math.inf}, "seconds: expected more than 0"),
        ({"scores": 5, "least": 6}, "least: expected 1 to 5"),
    ],
)
def test_a_window_without_a_length_is_rejected(named, message):
    with pytest.raises(SpecError, match=message):
        DriftWindow(BINS, **{"least": 1, **named})


def test_bins_of_nothing_are_rejected():
    for scores in ((), (1.0, math.nan)):
        with pytest.raises(SpecError, match="scores: expected one or more finite numbers"):
            ScoreBins.of_scores(scores)
    with pytest.raises(SpecError, match="bins: expected 2 to 256, got 1"):
        ScoreBins.of_scores([1.0], 1)
    with pytest.raises(ValueError, match="expected 2 counts, got 3"):
        stability_index([1, 2], [1, 2, 3])
