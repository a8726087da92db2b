"""Scores, selections by token id and what was selected, from what the workers sent."""

from dataclasses import replace

import pytest
import torch
from support.answers import POST, PRE, answer, assembled, rows, vector
from support.plans import VECTORS, plan_of, probe

from midstream.plan import Flag, Match, ResolvedPlan, ResolvedProbe, Steps, Where

EVERYWHERE = ((0, None),)


def test_an_edit_by_token_id_is_expected_at_those_tokens_only():
    # Generated tokens are 200, 201, …; the prompt is 3 long, the last token is never fed back.
    where = Where(((1, 2),), (Match(((3, None),), (200, 203)),))
    plan = plan_of(edits=[(POST, VECTORS[0], 1.0, where)], prompt_len=3)
    found = assembled(plan, [answer(("x", [0, 3, 0, 3, 2, 2, 3], []))], generated=5)
    assert found.receipt.status == "ok"
    edited = found.receipt.edited
    assert (edited.expected, edited.applied, edited.tokens) == (3, 3, 3)
    assert [str(one) for one in found.receipt.selected] == ["edits[0]: positions 1, 3, 6"]
    wrong = assembled(plan, [answer(("x", [0, 3, 0, 3, 3, 2, 3], []))], generated=5)
    assert wrong.receipt.problems == (
        "1 positions were not edited as asked: position 4 got 1 edits and probes, expected 0",
    )


@pytest.mark.parametrize("others", [False, True])
def test_of_rows_by_token_id_those_of_other_tokens_are_dropped(others):
    where = Where((), (Match(((3, None),), (201, 202), others),))
    plan = plan_of(captures=[([POST], where)], prompt_len=3)
    # The worker cannot know the ids of tokens to come: it keeps all of them.
    found = assembled(
        plan, [answer(("x", [0] * 3 + [2] * 4, [rows([POST], range(3, 7))]))], generated=5
    )
    wanted = [3, 6] if others else [4, 5]
    assert found.activations.positions.tolist() == wanted
    assert found.activations[POST].tolist() == [vector(POST, p) for p in wanted]
    assert found.receipt.status == "ok"


SCORED = plan_of(probes=[("a", PRE, EVERYWHERE), ("b", POST, ((1, 3),))], prompt_len=3)


def table(first, count, base=0.0):
    """Scores [count, 2]: slot 0 tells the position, slot 1 its negative."""
    return first, [[base + first + n, -(base + first + n)] for n in range(count)]


def test_each_probe_has_its_scores_by_name_with_positions_and_tokens():
    found = assembled(
        SCORED, [answer(("x", [3, 4, 4, 3], []), taps=[PRE, POST], scores=[table(0, 4)])]
    )
    assert found.receipt.status == "ok"
    assert dict(found.probes) == {"a": found.probes["a"], "b": found.probes["b"]}
    assert found.probes["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.probes["b"].tolist() == [-1.0, -2.0]
    assert found.probes["a"].dtype == torch.float32
    assert found.probes.positions_of("b").tolist() == [1, 2]
    assert found.probes.token_ids_of("a").tolist() == [100, 101, 102, 200]
    assert [(one.name, one.expected, one.actual) for one in found.receipt.probed] == [
        ("a", 4, 4),
        ("b", 2, 2),
    ]
    assert found.receipt.edited is None
    assert found.activations is None
    assert found.probes is found.outputs[0].probes


def test_requests_of_one_plan_have_their_own_scores_and_are_compared_with_it_each():
    captures = [([PRE, POST], EVERYWHERE)]
    plan = plan_of(captures=captures, probes=[("a", PRE, EVERYWHERE)], prompt_len=3)

    def one(scores, version):
        sent = ("x", [3, 3, 3, 3], [rows([PRE, POST], range(4), version)])
        return assembled(plan, [answer(sent, scores=[scores])])

    for version, base in enumerate([0.0, 10.0, 20.0]):
        found = one(table(0, 4, base), version)
        assert found.probes["a"].tolist() == [base + n for n in range(4)]
        assert found.activations[POST][3].tolist() == vector(POST, 3, version)
        assert found.receipt.status == "ok"
        found.probes["a"].zero_()
        found.probes.positions_of("a").zero_()
        fewer = one(table(1, 3, base), version)
        assert fewer.probes["a"].tolist() == [base + n for n in range(1, 4)]
        assert fewer.receipt.problems == ("probe a: 3 scores came, expected 4",)


def test_requests_of_one_plan_act_by_their_own_scores():
    (probe,) = plan_of(probes=[("a", PRE, EVERYWHERE)]).probes
    plan = ResolvedPlan(3, (), (), (replace(probe, act=Flag(above=1.5)),))
    for base, where in ((0.0, [2]), (-9.0, []), (1.0, [1])):
        sent = [answer(("x", [3] * 4, []), taps=[PRE], scores=[table(0, 4, base)])]
        found = assembled(plan, sent).receipt
        assert [one.position for one in found.actions] == where


def test_a_probe_that_was_not_carried_out_is_found_though_a_score_came():
    found = assembled(
        SCORED, [answer(("x", [3, 3, 4, 3], []), taps=[PRE, POST], scores=[table(0, 4)])]
    )
    assert found.receipt.problems == (
        "1 positions were not edited as asked: position 1 got 1 edits and probes, expected 2",
    )


def test_the_last_score_is_chosen_of_all_candidates():
    plan = plan_of(probes=[("a", PRE, Where((), last_from=2))], prompt_len=3)
    answers = [answer(("x", [0, 0, 3, 3, 3], []), taps=[PRE], scores=[table(2, 3)])]
    found = assembled(plan, answers, generated=3)
    assert found.probes["a"].tolist() == [4.0]
    assert found.receipt.status == "ok"


def test_what_only_a_gate_reads_is_counted_but_no_result():
    gate = ResolvedProbe("", *PRE, Steps(probe(slot=0)), Where(((1, None),)))
    edits = plan_of(edits=[(POST, VECTORS[0], 1.0, ((1, None),))]).edits
    plan = ResolvedPlan(3, edits, (), (gate,))
    found = assembled(plan, [answer(("x", [0, 4, 4, 4], []))])
    assert found.receipt.status == "ok"
    assert found.probes is None
    edited = found.receipt.edited
    assert (edited.expected, edited.applied, edited.tokens) == (3, 3, 3)
    assert found.receipt.probed == ()
    short = assembled(plan, [answer(("x", [0, 4, 3, 4], []))]).receipt
    assert short.status == "error"
    assert (short.edited.expected, short.edited.applied) == (3, 2)


def test_a_receipt_tells_the_positions_of_each_part_server_wide_edits_first():
    plan = plan_of(
        edits=[
            (PRE, VECTORS[0], 1.0, ((0, 2),)),
            (POST, VECTORS[0], 1.0, ((0, 2),)),
            (POST, VECTORS[1], 1.0, ((3, None),)),
        ],
        captures=[([PRE], Where(((0, 1),), last_from=2))],
        probes=[("a", PRE, ((5, 9),))],
        prompt_len=3,
    )
    edits = [
        replace(edit, source=source) for edit, source in zip(plan.edits, (-1, 0, 0), strict=True)
    ]
    found = assembled(replace(plan, edits=tuple(edits)), [answer()])
    assert [str(one) for one in found.receipt.selected] == [
        "capture[0]: positions 0, 3",
        "steering[-1]: positions 0–1",
        "edits[0]: positions 0–1, 3",
        "probes[0]: positions none",
    ]
