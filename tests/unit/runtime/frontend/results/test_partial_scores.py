"""What is known of a completion that goes on is a beginning of what is known at its end."""

from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given
from support import plans
from support.stored import worker_info

from midstream.plan import Steps
from midstream.plan.positions.automaton import Marks, automaton_of
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.scores.rule import NO_TOKENS, ScoreRule
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.protocol.scores import ScoreBlock

TAP = ("resid_post", 1)
WORKER = worker_info(taps=(TAP,))
ELSEWHERE = worker_info(taps=(("resid_post", 2),))
PROMPT_LEN = 4

MARKS = Marks((1,), (3,))
MARKED = Where(
    ((0, 2),), (Match(((4, None),), automaton=automaton_of(4, [(MARKS, MARKS.first)], [])),)
)
WHERES = st.sampled_from(
    [
        MARKED,
        Where(((0, None),)),
        Where(((0, 2), (3, 4), (6, 9))),
        Where(((4, None),)),
        Where((), (Match(((4, None),), (1, 3)),)),
        Where(((0, 4),), (Match(((5, 9),), (0, 2), others=True),)),
        Where(((0, 4),), last_from=5),
        Where(()),
    ]
)


def plan_of(wheres):
    return plans.plan_of(
        probes=[
            *((f"p{n}", TAP, where) for n, where in enumerate(wheres)),
            ("", TAP, Where(((0, None),))),
        ]
    )


def answer(span, slots):
    positions = np.arange(*span)
    values = (positions[:, None] * 10 + np.arange(slots)).astype(np.float32)
    # The order of the workers is no order of positions; one of them has another layer's.
    return [ScoreBlock(ELSEWHERE, positions, -values), ScoreBlock(WORKER, positions, values)]


@example([MARKED, Where(((4, None),))], [[1], [0, 2], [], [2, 3, 0, 1], [0], [3], [1, 1, 1]], True)
@given(
    wheres=st.lists(WHERES, min_size=1, max_size=3),
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=20),
    is_delta=st.booleans(),
)
def test_scores_so_far_are_those_of_the_rows_so_far(wheres, pieces, is_delta):
    streamed = StreamState(plan_of(wheres), [7] * PROMPT_LEN)
    generated: list[int] = []
    handed_out = []
    for piece in pieces:
        generated += piece
        shown = piece if is_delta else list(generated)
        streamed.record(SimpleNamespace(token_ids=shown), is_delta)
        span = streamed.next_span()
        if span is not None:
            streamed.add(answer(span, len(wheres)))
        known = PROMPT_LEN + len(generated) - 1
        tokens = [7] * PROMPT_LEN + generated
        found = streamed.probes()
        for nth, where in enumerate(wheres):
            so_far = Where(where.ranges, where.matches)
            expected = [p for a, b in so_far.final(known, tokens) for p in range(a, b)]
            assert found.positions_of(f"p{nth}").tolist() == expected
            assert found[f"p{nth}"].tolist() == [10 * p + nth for p in expected]
            assert found.token_ids_of(f"p{nth}").tolist() == [tokens[p] for p in expected]
            handed_out.append((found[f"p{nth}"], [10 * p + nth for p in expected]))
    assert streamed.generated == generated
    # What a caller was given stays as it was, and is its own to change.
    for scores, expected in handed_out:
        assert scores.tolist() == expected
        scores.fill_(-1)


def test_nobody_is_asked_where_no_probe_selects_anything():
    streamed = StreamState(plan_of([Where(((0, 2),))]), [7] * PROMPT_LEN)
    streamed.record(SimpleNamespace(token_ids=[1]), False)
    assert streamed.next_span() == (0, 4)
    streamed.record(SimpleNamespace(token_ids=[1, 1]), False)
    assert streamed.next_span() is None
    nothing = StreamState(SimpleNamespace(probes=[]), [7] * PROMPT_LEN)
    nothing.record(SimpleNamespace(token_ids=[1]), False)
    assert nothing.next_span() is None
    assert nothing.probes() is None


RULES = st.sampled_from(
    [
        ScoreRule(4, "softmax", bias=0.5),
        ScoreRule(4, "softmax", 3, pool="max"),
        ScoreRule(3, "max", link="sigmoid"),
        ScoreRule(3, link="softmax", pool="mean:4"),
        ScoreRule(pool="ema:0.5"),
    ]
)


@given(
    rule=RULES,
    where=WHERES,
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=12),
)
def test_scores_of_a_rule_so_far_are_those_of_all_rows_so_far(rule, where, pieces):
    plan = plan_of([where])
    (probe,) = [probe for probe in plan.probes if probe.name]
    steps = tuple(replace(probe.steps.instructions[-1], slot=slot) for slot in range(rule.columns))
    probe = replace(probe, steps=Steps(steps), rule=rule, outputs=("a", "b", "c"))
    streamed = StreamState(replace(plan, probes=(probe,)), [7] * PROMPT_LEN)
    numbers = np.random.default_rng(0).standard_normal((99, rule.columns)).astype(np.float32)
    generated = []
    for piece in pieces:
        generated += piece
        streamed.record(SimpleNamespace(token_ids=piece), is_delta=True)
        span = streamed.next_span()
        if span is not None:
            positions = np.arange(*span)
            streamed.add([ScoreBlock(WORKER, positions, numbers[positions])])
        known = PROMPT_LEN + len(generated) - 1
        tokens = [7] * PROMPT_LEN + generated
        selected = Where(where.ranges, where.matches).final(known, tokens)
        places = [place for start, stop in selected for place in range(start, stop)]
        _, expected = rule.follow(NO_TOKENS, numbers[places])
        found = streamed.probes()
        assert found.positions_of(probe.name).tolist() == places
        np.testing.assert_array_equal(found[probe.name].numpy(), expected)
        assert found.outputs_of(probe.name) == (("a", "b", "c") if rule.outputs else ())
