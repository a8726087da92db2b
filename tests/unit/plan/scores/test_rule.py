"""Scores of every family, against their definition in float64, in parts of any size."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.score_rules import attended, scores_by_definition

from midstream.plan.scores.rule import NO_TOKENS, ScoreRule
from midstream.plan.scores.units import UnitLayer

POOLS = ["none", "max", "mean:1", "mean:3", "mean:8", "ema:0.9"]


@st.composite
def rules(draw) -> ScoreRule:
    over = draw(st.sampled_from(["none", "softmax", "max"]))
    heads = draw(st.integers(1, 4))
    columns = 2 * heads if over == "softmax" else heads
    links = ["none", "sigmoid", "softmax"] if over == "none" and columns > 1 else ["none"]
    window = draw(st.sampled_from([0, 2, 3, 10])) if over == "softmax" else 0
    bias = draw(st.sampled_from([0.0, -1.5])) if over != "none" else 0.0
    pool, link = draw(st.sampled_from(POOLS)), draw(st.sampled_from([*links, "sigmoid"]))
    rule = ScoreRule(columns, over, window, bias, link, pool)
    if columns == 1 or not draw(st.booleans()):
        return rule
    units = draw(st.integers(1, 5))
    weights = np.random.default_rng(units).standard_normal((columns, units)).astype("<f4")
    biases = draw(st.sampled_from([b"", weights[:, 0].tobytes()]))
    activation = draw(st.sampled_from(["relu", "tanh", "silu", "gelu"]))
    return replace(
        rule, columns=units, units=UnitLayer(activation, units, weights.tobytes(), biases)
    )


def numbers_of(rule: ScoreRule, count: int, seed: int, scale: float) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return (scale * draw.standard_normal((count, rule.columns))).astype(np.float32)


def in_parts(rule: ScoreRule, numbers: np.ndarray, cuts: list[int]) -> np.ndarray:
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    state, parts = NO_TOKENS, []
    for start, stop in zip(edges, edges[1:], strict=False):
        state, scores = rule.follow(state, numbers[start:stop])
        parts.append(scores)
    return np.concatenate(parts)


@given(
    rules(),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 3.0, 400.0]),
    st.lists(st.integers(0, 40), max_size=8),
)
@settings(max_examples=rounds(suite=400, nightly=5000), deadline=None)
def test_scores_are_those_of_the_definition_in_parts_of_any_size(rule, count, seed, scale, cuts):
    numbers = numbers_of(rule, count, seed, scale)
    scores = in_parts(rule, numbers, [])
    expected = scores_by_definition(rule, numbers)
    assert scores.shape == (count, rule.outputs) if rule.outputs else (count,)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=2e-6, atol=2e-6 * scale)
    np.testing.assert_array_equal(in_parts(rule, numbers, cuts), scores)
    np.testing.assert_array_equal(in_parts(rule, numbers, list(range(count))), scores)


@given(rules(), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=rounds(suite=200, nightly=3000), deadline=None)
def test_a_number_that_is_not_finite_counts_at_its_own_token_alone(rule, seed, cuts):
    numbers = numbers_of(rule, 30, seed, 2.0)
    spoiled = numbers.copy()
    draw = np.random.default_rng(seed)
    bad = np.flatnonzero(draw.random(30) < 0.2)
    spoiled[bad] = draw.choice([np.nan, np.inf, -np.inf], (len(bad), rule.columns))
    scores = in_parts(rule, spoiled, cuts)
    np.testing.assert_array_equal(scores, in_parts(rule, spoiled, []))
    if rule.over != "none" or (rule.columns == 1 and not rule.units and rule.pool[:4] != "mean"):
        is_nan = np.isnan(spoiled).any(1)
        assert np.isnan(scores[is_nan]).all()
    good = np.setdiff1d(np.arange(30), bad)
    if rule.pool.startswith("mean") or (rule.over == "none" and rule.link != "none") or rule.units:
        # A mean has it for as long as it is in the window; a link may make it finite.
        return
    np.testing.assert_array_equal(scores[good], in_parts(rule, numbers[good], []))


@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_one_output_is_pooled_as_among_all(pool, outputs):
    rule = ScoreRule(outputs or 1, link="none", pool=pool)
    numbers = numbers_of(rule, 50, 3, 1.0)
    numbers[[4, 20], 0] = [np.inf, np.nan]
    _, scores = rule.follow(NO_TOKENS, numbers)
    for output in range(outputs):
        _, alone = replace(rule, output=output).follow(NO_TOKENS, numbers)
        np.testing.assert_array_equal(alone, scores[:, output])
    if not outputs:
        np.testing.assert_array_equal(
            replace(rule, columns=2, output=1).follow(NO_TOKENS, np.hstack([numbers] * 2))[1],
            scores,
        )


def test_a_million_tokens_lose_nothing():
    """The exact score is that of log-sum-exp in float64, at places over the whole length."""
    draw = np.random.default_rng(0)
    count, heads = 1_000_000, 2
    numbers = draw.standard_normal((count, 2 * heads)).astype(np.float32)
    numbers[:, 0] *= 30  # some tokens have most of the weight
    numbers[700_000, 0] = 900  # and then one has all of it
    rule = ScoreRule(2 * heads, "softmax")
    state, scores = NO_TOKENS, []
    edges = [0, *sorted(draw.integers(0, count, 40).tolist()), count]
    for start, stop in zip(edges, edges[1:], strict=False):
        state, part = rule.follow(state, numbers[start:stop])
        scores.append(part)
    found = np.concatenate(scores)
    wide = numbers.astype(np.float64)
    for place in (0, 1, 999, 123_456, 699_999, 700_000, count - 1):
        logits, values = wide[: place + 1, :heads], wide[: place + 1, heads:]
        total = np.logaddexp.reduce(logits, 0)
        expected = float((np.exp(logits - total) * values).sum())
        assert found[place] == pytest.approx(expected, abs=1e-7)  # a float32
    # Before rounding, by the state itself.
    _, total, weighted = state.attention.rows
    logits, values = wide[:, :heads], wide[:, heads:]
    means = (np.exp(logits - np.logaddexp.reduce(logits, 0)) * values).sum(0)
    np.testing.assert_allclose(weighted / total, means, rtol=0, atol=1e-9)


def test_logits_that_rise_without_end_overflow_nothing():
    rise = np.linspace(-5000, 5000, 300)
    numbers = np.stack([rise, np.arange(300.0)], 1).astype(np.float32)
    for window in (0, 4):
        for step in (1, 300):
            cuts = list(range(0, 300, step))
            scores = in_parts(ScoreRule(2, "softmax", window), numbers, cuts)
            wide = numbers.astype(np.float64)
            expected = attended(wide[:, :1], wide[:, 1:], window)
            np.testing.assert_allclose(scores, expected, rtol=1e-6)
    _, falling = ScoreRule(2, "softmax").follow(NO_TOKENS, numbers[::-1].copy())
    np.testing.assert_allclose(falling, 299, rtol=1e-6)


def test_a_state_is_not_changed_by_what_follows():
    """Draft tokens that are rejected are taken back by taking the state before them."""
    for rule in (ScoreRule(4, "softmax"), ScoreRule(4, "softmax", 3), ScoreRule(2, "max"),
                 ScoreRule(2, pool="mean:3"), ScoreRule(pool="ema:0.5")):  # fmt: skip
        numbers = numbers_of(rule, 12, 1, 1.0)
        state, _ = rule.follow(NO_TOKENS, numbers[:5])
        _, first = rule.follow(state, numbers[5:])
        numbers[:5] = 1e6  # nor by what becomes of the buffer that it was made of
        rule.follow(state, np.full((3, rule.columns), 7.0, np.float32))
        np.testing.assert_array_equal(rule.follow(state, numbers[5:])[1], first)
