"""The async engine: as the offline one, with scores that come with the tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_calls import COUNT, KINDS, assert_alike, assert_close, prompt, results_of, vector
from support.async_run import ALL_SITES, TAPPED, plan
from support.oracle import HookEdit, Oracle, relative_error


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("support.async_run", tiny_llama, tmp_path_factory.mktemp("async"))


def rows(nth: int) -> int:
    return len(prompt(nth)["prompt_token_ids"])


@pytest.mark.parametrize("nth", range(COUNT))
def test_each_of_twenty_at_once_gets_what_the_offline_engine_gives(found, nth):
    assert_alike(found["mix"][nth], found["offline"][nth], bool(plan(nth)))


@pytest.mark.parametrize("nth", range(COUNT))
def test_scores_grow_with_the_tokens_and_end_as_the_final_ones(found, nth):
    mine = found["mix"][nth]
    if KINDS[nth % 3] == "FINAL_ONLY":
        assert mine["partial"] == []
        return
    if KINDS[nth % 3] == "DELTA":
        assert sum(mine["shown"]) == len(mine["generated"])
    named = mine["probes"] is not None
    for shown, scores, activations, receipt in mine["partial"]:
        assert activations is None
        assert receipt is None
        assert (scores is not None) == named
        for name, (values, positions, ids) in (scores or {}).items():
            final, known, tokens = mine["probes"][name]
            stop = rows(nth) + shown - 1
            expected = known < stop
            if name == "b":
                # Its last row is only known at the end.
                expected &= known < rows(nth)
            assert torch.equal(positions, known[expected])
            assert torch.equal(values, final[expected])
            assert torch.equal(ids, tokens[expected])


def test_several_completions_have_a_receipt_and_results_each(found):
    first, second = found["several"]["outputs"]
    assert first["receipt"]["status"] == second["receipt"]["status"] == "ok"
    assert first["activations"].keys() == {("resid_post", 2)}
    assert found["several"]["receipt"] is None


def test_a_receipt_with_problems_is_raised_from_its_own_request_only(found):
    assert found["errors"]["bad"] == ("ReceiptError", "request bad: spoilt")
    assert found["errors"]["good"] == "ok"
    assert found["errors"]["other"] == "length"


def test_calls_that_are_given_up_end_and_leave_nothing_behind(found):
    # That nothing is left was checked on the workers as well; see `check_integrity`.
    assert found["cancelled"] == ["CancelledError"] * 8
    # While a thread was still preparing it: the helper then sees that nothing of it is left.
    assert found["early cancel"] == "CancelledError"


def test_an_aborted_request_keeps_the_scores_that_were_known(found):
    aborted = found["aborted"]
    assert aborted["reason"] == "abort"
    assert aborted["receipt"] is None
    assert aborted["activations"] is None
    shown, known = aborted["before"]
    assert len(aborted["probes"]["after"][0]) == rows(1) + shown - 1
    assert_close(aborted["probes"], known)


def test_a_request_without_room_waits_and_others_pass(found):
    assert found["waiting"] == {
        "first": "ok",
        "second": "ok",
        "passing": "length",
        "given up": "CancelledError",
    }
    assert found["order"] == ["passing", "removed", "first", "second"]
    assert found["removed"]["reason"] == "abort"
    assert found["removed"]["generated"] == []
    assert found["removed"]["probes"] is None


def test_server_wide_edits_reach_requests_without_a_plan(found):
    edited = found["steered"]["receipt"]["edited"]
    assert edited["applied"] == edited["expected"] == rows(0) + 6 - 1
    for name in ("unsteered", "plain"):
        assert found[name]["receipt"] is None
        assert found[name]["probes"] is None
    assert found["unsteered"]["generated"] == found["plain"]["generated"]
    kind, message = found["bare"]
    assert kind == "SpecError"
    assert "generate()" in message


def test_the_engine_says_what_is_tapped_once_it_was_asked(found):
    assert "await llm.ready()" in found["early"]
    assert found["sites"] == sorted((site, layer) for site in TAPPED for layer in range(3))


STREAMED = [(site, layer) for layer in (0, 2) for site in ALL_SITES]


@pytest.mark.parametrize("nth", range(24))
def test_an_output_shows_the_rows_of_the_tokens_before_its_last_and_the_last_shows_all(found, nth):
    mine, is_delta = found["streams"][nth], nth % 2
    assert mine["receipt"]["status"] == "ok"
    whole = mine["activations"]
    assert len(whole) == 9
    *partial, (_, finished, last) = mine["shown"]
    assert finished
    assert all(torch.equal(last[tap][0], rows) for tap, (rows, _) in whole.items())
    assert_close(whole, found["stream plain"][nth // 2]["activations"])
    begin = 0
    for generated, _, shown in partial:
        # The last row may be any that is the last so far: one is held back.
        stop = rows(nth // 2) + generated - 2
        assert sorted(shown) == sorted(STREAMED)
        for tap, (values, positions, ids) in shown.items():
            assert positions.tolist() == list(range(begin, stop))
            assert torch.equal(values, whole[tap][0][begin:stop])
            assert torch.equal(ids, last[tap][2][begin:stop])
        begin = stop if is_delta else 0


def test_most_streams_show_rows_and_scores_before_their_last_output(found):
    # Not all: vLLM merges the outputs of a stream that is read too slowly.
    partial = [scores for mine in found["mix"] for _, scores, *_ in mine["partial"]]
    assert any(scores is not None for scores in partial)
    assert sum(len(one["shown"]) > 1 for one in found["streams"]) > 12


def test_rows_on_the_way_are_refused_where_no_output_would_show_them(found):
    final, several, session = found["stream refused"]
    for kind, problem in (final, several):
        assert kind == "SpecError"
        assert problem.startswith("capture[1].stream: with output_kind=FINAL_ONLY")
    assert session[0] == "SpecError"
    assert session[1].startswith("capture[1].stream: rows of a session of streaming input")


def test_streamed_lenses_and_features_come_with_their_tokens_through_registered_maps_too(found):
    *partial, (finished, last) = found["stream lens"]
    assert finished
    assert len(partial) > 2
    for name, (positions, values) in last.items():
        assert positions.tolist() == list(range(rows(5) + 20 - 1))
        if name == "features":
            assert values.shape == (len(positions), 3)
            assert (values[:, 0] > 0).all()
        else:
            assert values.shape == (len(positions), 3, 2)
            assert torch.equal(values, last["logit"][1])
        for is_last, shown in partial:
            assert not is_last
            some, part = shown[name]
            assert torch.equal(some, positions[: len(some)])
            assert torch.equal(part, values[: len(some)])


def test_edits_of_running_requests_change_where_their_receipts_say(found, tiny_llama):
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm")
    known = found["updates"]
    whole = prompt(2)["prompt_token_ids"]
    length = len(whole) + 59
    for name in ("mine", "other"):
        one = known[name]
        versions = one["receipt"]["versions"]
        assert one["receipt"]["status"] == "ok"
        assert [number for _, number, _ in one["answers"]] == [1, 2, 3]
        begins = [0, *(position for _, _, position in one["answers"])]
        ends = [*begins[1:], length]
        assert [tuple(each["positions"]) for each in versions] == list(
            zip(begins, ends, strict=True)
        )
        for count, _, position in one["answers"]:
            assert position >= len(whole) + count - 1
        _replay(oracle, one, [(vector(4), 1, 2.0, 0), (vector(5), 0, 3.0, 2)])
    assert known["alone"]["receipt"]["versions"] == []
    _replay(oracle, known["alone"], [(vector(4), 1, 2.0, 0)])
    positions, several = known["several"]
    assert set(positions) == {0, 1}
    for nth, each in enumerate(several["outputs"]):
        assert each["receipt"]["status"] == "ok"
        assert each["receipt"]["versions"][1]["positions"][0] == positions[nth]


def test_controllers_change_their_requests_and_leave_the_others(found, tiny_llama):
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm")
    known = found["updates"]["controlled"]
    edit = (vector(4), 1, 2.0)
    switches = known["switches"]["receipt"]["versions"]
    assert len(switches) > 3
    assert {each["source"] for each in switches[1:]} == {"controller:third"}
    _replay(
        oracle,
        known["switches"],
        [(*edit, nth) for nth, each in enumerate(switches) if each["scale"] == 1],
    )
    for name in ("fails", "alone"):
        assert known[name]["receipt"]["versions"] == []
        _replay(oracle, known[name], [(*edit, 0)])
    assert [each["source"] for each in known["hangs"]["receipt"]["versions"]] == [
        "request",
        "controller:local",
    ]
    _replay(oracle, known["hangs"], [(*edit, 0)])
    ended = known["stops"]
    assert (ended["reason"], ended["stop_reason"]) == ("stop", "controller:limit")
    assert 12 <= len(ended["generated"]) < 60
    assert [each["source"] for each in ended["receipt"]["versions"]] == [
        "request",
        "controller:limit",
    ]
    assert ended["receipt"]["status"] == "ok"
    assert (
        ended["activations"]["resid_post", 0][0].shape[0] == rows(2) + len(ended["generated"]) - 1
    )
    _replay(oracle, ended, [(*edit, 0)])
    kind, problem = known["ends"]
    assert kind == "ControllerError"
    assert problem.startswith("controller 'local' of request 'cends' failed: RuntimeError")


def _replay(oracle: Oracle, one: dict[str, Any], edits: list[tuple[Any, int, float, int]]) -> None:
    """Compare rows and tokens with transformers, where each edit (vector, layer, scale, number of
    the version) holds where its version did.
    """
    whole = prompt(2)["prompt_token_ids"]
    held = [each["positions"] for each in one["receipt"]["versions"]] or [(0, 1 << 20)]
    hooks = [
        HookEdit("resid_post", layer, push, scale, lambda at, where=held[nth]: at in range(*where))
        for push, layer, scale, nth in edits
    ]
    logits, seen = oracle.run([*whole, *one["generated"]][:-1], hooks)
    assert logits[len(whole) - 1 :].argmax(-1).tolist() == one["generated"]
    for tap, (rows_, positions) in one["activations"].items():
        assert relative_error(rows_, seen[tap][positions]) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_no_stream_shows_a_token_beyond_the_one_that_a_probe_stopped_at(found, kind):
    whole, where = found["stops"]["whole"], found["stops"]["where"]
    stopped, other = found["stops"][kind]
    assert stopped["generated"] == whole["generated"][: where + 1]
    assert other["generated"] == whole["generated"]
    # What was shown of a stream at any time is no more either.
    sizes = stopped["shown"]
    assert (sum(sizes) if kind == "DELTA" else max(sizes)) == where + 1
    (action,) = stopped["receipt"]["actions"]
    assert (action["kind"], stopped["reason"]) == ("stop", "stop")
    assert action["position"] == rows(2) + where
    torch.testing.assert_close(
        stopped["probes"]["guard"][0], whole["probes"]["guard"][0][: where + 1],
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
