"""The async engine beside vLLM's own features, and sessions of streaming input."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.alongside import PUSH, TOLERANCE, hooked, rows_of
from support.async_calls import results_of
from support.engines import ALL_SITES
from support.marks import between
from support.oracle import Oracle, relative_error
from system.alongside_async import (
    LOOKED_FOR,
    marks_of,
    params,
    parts_of,
    prompt,
    session_params,
    session_plan,
    turns_of,
)

SESSIONS = range(12)


@pytest.fixture(scope="module")
def found(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("system.alongside_async", talking_llama, tmp_path_factory.mktemp("alongside"))


def check(
    oracle: Oracle, one: dict[str, Any], rows: list[int], where: Any = lambda _: True
) -> torch.Tensor:
    """Holds all rows, scores and counts of what came of an EVERYTHING capture, with the edit at the
    positions for which `where` holds, against one forward over the same tokens; returns its logits.
    """
    applied = sum(map(where, range(len(rows))))
    logits, seen = oracle.run(rows, [hooked(where=where)])
    assert set(one["activations"]) == {(site, nth) for site in ALL_SITES for nth in range(3)}
    for tap, (values, positions) in one["activations"].items():
        assert positions.tolist() == list(range(len(rows)))
        assert relative_error(values, seen[tap]) < TOLERANCE
    receipt = one["receipt"]
    assert receipt["status"] == "ok"
    assert receipt["prompt_tokens"] + receipt["generated_tokens"] - 1 == len(rows)
    if applied:
        assert receipt["edited"]["expected"] == receipt["edited"]["applied"] == applied
    else:
        assert receipt["edited"] is None
    if one["probes"] is not None:
        scores, positions, ids = one["probes"]["p"]
        assert positions.tolist() == list(range(len(rows)))
        assert ids.tolist() == rows
        expected = seen["resid_post", 2] @ PUSH
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
    return logits


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
def test_rows_past_a_stop_string_are_not_there(found, talking_oracle, kind):
    one = found["requests"][kind]
    generated = one["generated"]
    assert one["reason"] == "stop"
    assert len(generated) < 24
    check(talking_oracle, one, rows_of(prompt(0, 21), generated))


def session_rows(parts: list[list[int]], turns: list[list[int]]) -> list[int]:
    """What the model computed on: the last token of each turn was never fed."""
    assert len(turns) == len(parts)
    return [token for part, turn in zip(parts, turns, strict=True) for token in (*part, *turn[:-1])]


def edited(nth: int, rows: list[int]) -> Any:
    if "steer" not in session_plan(nth):
        return lambda _: False
    if nth > 7:
        return frozenset(between(rows, *marks_of(nth))).__contains__
    return [
        lambda _: True,
        range(4, 19, 3).__contains__,
        lambda position: rows[position] == LOOKED_FOR,
        lambda position: position == 2 or position >= 9,
    ][nth % 4]


@pytest.mark.parametrize("nth", SESSIONS)
def test_a_session_has_every_row_of_all_its_turns_once_and_each_edit_where_asked(
    found, talking_oracle, nth
):
    one, parts = found["sessions"][nth], parts_of(nth)
    turns = turns_of(one["generated"], session_params(nth))
    rows = session_rows(parts, turns)
    assert one["probes"]["p"][2].tolist() == rows
    logits = check(talking_oracle, one, rows, edited(nth, rows))
    # Every token that was sampled, the dropped ones too, is what the edited model says.
    start = 0
    for part, turn in zip(parts, turns, strict=True):
        start += len(part)
        assert turn == logits[start - 1 : start - 1 + len(turn)].argmax(-1).tolist()
        start += len(turn) - 1


def test_the_sessions_that_were_tried_differ_in_what_matters(found):
    sessions = found["sessions"]
    turns = [turns_of(one["generated"], session_params(nth)) for nth, one in enumerate(sessions)]
    assert {len(each) for each in turns} == {1, 2, 3, 4}
    assert any(len(turn) == 1 for each in turns for turn in each[1:])
    # Position limits reach past the first input, and ids are met on both sides.
    applied = [one["receipt"]["edited"] for one in sessions]
    assert [each is None for each in applied] == [nth % 5 == 4 for nth in SESSIONS]
    assert all(one["finished"][-1] and not any(one["finished"][:-1]) for one in sessions)


def test_a_request_beside_sessions_is_right(found, talking_oracle):
    rows = rows_of(prompt(9, 40), found["between"]["outputs"][0]["ids"])
    check(talking_oracle, found["between"], rows)


def test_the_last_row_of_a_session_is_that_of_its_last_turn(found, talking_oracle):
    one = found["last_row"]
    rows = session_rows(parts_of(3), turns_of(one["generated"], [params(4)] * 4))
    _, seen = talking_oracle.run(rows)
    [(tap, (values, positions))] = one["activations"].items()
    assert positions.tolist() == [len(rows) - 1]
    assert relative_error(values, seen[tap][-1:]) < TOLERANCE


def test_a_session_has_the_scores_and_sums_of_earlier_turns_that_no_block_keeps(found):
    session, expected = found["attended"]
    assert session["receipt"]["status"] == "ok"
    for name, (scores, positions, ids) in expected["probes"].items():
        mine = session["probes"][name]
        assert (mine[1].tolist(), mine[2].tolist()) == (positions.tolist(), ids.tolist())
        torch.testing.assert_close(mine[0], scores, rtol=1e-4, atol=1e-4)
    assert (expected["probes"]["mass"][0][2:] > 0).all()
    for tap, (values, _) in expected["activations"].items():
        torch.testing.assert_close(session["activations"][tap][0], values, rtol=1e-4, atol=1e-4)


def test_sessions_end_cleanly_however_they_end(found, talking_oracle):
    ends = found["ends"]
    assert ends["none"] == {"finished": [], "generated": []}
    assert ends["plain"]["receipt"] is None
    assert ends["broken"] == ("ZeroDivisionError", "the caller's own")
    kind, problem = ends["refused"]
    assert kind == "SpecError"
    assert problem.startswith('capture[1].phase: "generated" is unsupported in a streaming')
    assert ends["aborted"] == "abort"
    assert ends["left"] == "CancelledError"
    each = [params(4)] * 4
    rows = session_rows(parts_of(3), turns_of(ends["steered"]["generated"], each))
    receipt = ends["steered"]["receipt"]
    assert receipt["edited"]["applied"] == receipt["edited"]["expected"] == len(rows)
    assert receipt["edited"]["tokens"] == len(rows)
    assert session_rows(parts_of(3), turns_of(ends["plain"]["generated"], each)) != rows


def test_a_session_without_room_waits_with_all_its_inputs_in_order(found, talking_oracle):
    assert found["waited"], "it found room: the test shows nothing"
    one = found["second"]
    rows = session_rows(parts_of(3), turns_of(one["generated"], [params(5)] * 4))
    assert one["receipt"]["status"] == "ok"
    assert one["receipt"]["edited"]["applied"] == 15 * len(rows)
    _, seen = talking_oracle.run(rows, [hooked()])
    for tap, (values, positions) in one["activations"].items():
        assert positions.tolist() == list(range(len(rows)))
        assert relative_error(values, seen[tap]) < TOLERANCE
