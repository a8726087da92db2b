"""Metrics: their values against formulas, their JSON forms, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from midstream import KL, LogitDiff, LogProb, Recovered
from midstream.errors import SpecError
from midstream.lab.sweep.metrics import NextToken, read_metric

TOKENS = st.integers(0, 2**31 - 1) | st.text(min_size=1, max_size=5)
PLAIN = st.one_of(
    TOKENS.map(LogProb),
    st.lists(TOKENS, min_size=2, max_size=2, unique=True).map(lambda two: LogitDiff(*two)),
    st.just(KL()),
)
METRICS = PLAIN | PLAIN.map(Recovered)
NOWHERE = NextToken()


@given(METRICS)
def test_a_metric_is_read_from_its_json_form(metric):
    assert read_metric(metric.emit()) == metric
    assert read_metric(metric) is metric


def test_values_are_those_of_the_log_probabilities():
    run = NextToken({5: -1.5, 7: -4.0})
    assert LogProb(5).value(run, NOWHERE) == -1.5
    assert LogitDiff(5, 7).value(run, NOWHERE) == 2.5
    assert LogitDiff(7, 5).value(run, NOWHERE) == -2.5
    assert Recovered(LogProb(7)).value(run, NOWHERE) == -4.0


@given(st.integers(0, 1000))
def test_kl_is_the_relative_entropy(seed):
    draw = np.random.default_rng(seed)
    p, q = (softmax(draw.normal(size=50) * 3) for _ in range(2))
    p[:5] = 0.0
    p /= p.sum()
    with np.errstate(divide="ignore"):
        clean, run = (NextToken(every=np.log(one).astype(np.float32)) for one in (p, q))
    assert KL().value(run, clean) == pytest.approx(rel_entr(p, q).sum(), abs=1e-5)
    assert KL().value(clean, clean) == 0.0


def test_texts_become_ids_and_two_of_one_token_are_refused():
    known = {" Paris": 11, " Rome": 12}
    assert LogProb(" Paris").with_ids(known.__getitem__) == LogProb(11)
    assert LogitDiff(" Rome", 3).with_ids(known.__getitem__) == LogitDiff(12, 3)
    found = Recovered(LogitDiff(" Paris", " Rome")).with_ids(known.__getitem__)
    assert found == Recovered(LogitDiff(11, 12))
    assert found.tokens == (11, 12)
    assert not found.reads_all
    assert Recovered(KL()).reads_all
    with pytest.raises(SpecError, match="the same token") as error:
        LogitDiff(" a", "  a").with_ids(lambda _: 4)
    assert error.value.path == "logit_diff[1]"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"logprob": -1}, "logprob"),
        ({"logprob": ""}, "logprob"),
        ({"logit_diff": [1]}, "logit_diff"),
        ({"logit_diff": [1, 1]}, "logit_diff[1]"),
        ({"recovered": {"logprob": True}}, "recovered.logprob"),
        ({"recovered": {"recovered": "kl"}}, "recovered.metric"),
        ({"logprob": 1, "kl": None}, ""),
        ({"log_prob": 1}, ""),
        ("KL", ""),
    ],
)
def test_a_malformed_metric_is_refused_by_its_path(value, path):
    with pytest.raises(SpecError) as error:
        read_metric(value)
    assert error.value.path == path
