"""What the scores of a guard say, against the conditions that the engine core follows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.plan.control.act import Condition, Progress, follow
from midstream.results.probe_scores import Probes
from midstream.server.guards.judgement import judge, peak_of

CONDITIONS = st.builds(
    lambda name, threshold, count, pool: Condition(**{name: threshold}, for_=count, pool=pool),
    st.sampled_from(["above", "below"]),
    st.floats(-4, 4, width=32),
    st.integers(1, 4),
    st.sampled_from(["none", "max", "mean:1", "mean:3", "ema:0.5"]),
)


@given(CONDITIONS, st.lists(st.floats(width=32), max_size=12))
@settings(max_examples=300)
def test_a_peak_is_beyond_the_threshold_if_and_only_if_the_condition_is_met(condition, scores):
    found = peak_of(condition, np.array(scores, "float32"))
    _, met = follow(condition, Progress(), scores)
    beyond = (
        False
        if found is None
        else (found > condition.above if condition.above is not None else found < condition.below)
    )
    assert (met is not None) == beyond


@pytest.mark.parametrize(
    ("condition", "peak", "position", "score"),
    [
        (Condition(above=2.0), 5.0, 11, 3.0),
        (Condition(above=9.0), 5.0, None, 5.0),
        (Condition(below=0.0), -1.0, 12, -1.0),
        (Condition(above=2.0, for_=2), 3.0, 14, 5.0),
        (Condition(above=1.5, pool="mean:2"), 4.0, 11, 2.0),
        (Condition(above=3.5, pool="max"), 5.0, 14, 5.0),
        (Condition(above=2.0, pool="ema:0.5"), 3.375, 14, 3.375),
    ],
)
def test_a_judgement_has_the_peak_and_the_first_token_that_met_the_condition(
    condition, peak, position, score
):
    scores = np.array([1.0, 3.0, -1.0, 3.0, 5.0], "float32")
    probes = Probes({"g": torch.tensor(scores)}, {"g": torch.arange(10, 15)}, torch.arange(15))
    found = judge(condition, probes, "g")
    assert (found.peak, found.position, found.score) == (peak, position, score)


def test_without_finite_scores_there_is_no_judgement():
    for values in ([], [float("nan")], [float("inf"), float("-inf")]):
        scores = torch.tensor(values, dtype=torch.float32)
        probes = Probes({"g": scores}, {"g": torch.arange(len(values))}, torch.arange(4))
        assert judge(Condition(above=0.0), probes, "g") is None
    assert judge(Condition(above=0.0), None, "g") is None
