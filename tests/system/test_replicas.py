"""Data-parallel replicas: each request has what one engine alone gives it, wherever it ran."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import serving
from support.async_calls import assert_alike, assert_close
from support.compared import same_receipt
from support.engines import ALL_SITES
from support.own_process import python
from support.serving import NAME, Running
from system.replicas_run import COUNT, SEVERAL, plan, prompt

from midstream import Client

NOBIND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def found(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("replicas") / "found.pt"
    python("-m", "system.replicas_run", talking_llama, out, timeout=580, **NOBIND)
    loaded: dict[str, Any] = torch.load(out)
    return loaded


def rows(nth: int) -> int:
    return len(prompt(nth)["prompt_token_ids"])


@pytest.mark.parametrize("nth", range(COUNT))
def test_each_of_many_at_once_gets_what_one_engine_gives(found, nth):
    assert_alike(found["mix"][nth], found["single"][nth], bool(plan(nth)))


def test_both_replicas_ran_some_of_each_kind(found):
    assert [len(sent) for sent in found["sent"]] == [1] * COUNT
    by_kind: dict[int, set[int]] = {}
    for nth, [where] in enumerate(found["sent"]):
        by_kind.setdefault(nth % 5, set()).add(where)
    assert sum(len(where) == 2 for where in by_kind.values()) >= 3  # by load, as they come
    counts = [sum(where == [number] for where in found["sent"]) for number in range(2)]
    assert min(counts) >= COUNT // 4


def test_the_status_has_the_workers_of_each_replica(found):
    assert [number for number, _ in found["workers"]] == [0, 1]
    assert len({pid for _, pid in found["workers"]}) == 2
    workers = found["usage"]["workers"]
    assert [worker["replica"] for worker in workers] == [0, 1]
    assert all(worker["steps"]["active"] > 0 for worker in workers)
    assert found["usage"]["totals"]["completions"] == {"ok": COUNT - COUNT // 5}


def test_replicas_share_the_memory_of_their_machine(found):
    budgets = [one["arena"]["budget_bytes"] for one in found["usage"]["workers"]]
    # Each is a share of what was free when it started.
    assert sum(budgets) < 1.2 * found["memory"]


def test_of_what_is_too_much_for_all_replicas_together_some_waits(found):
    assert found["waited"] > 0


@pytest.mark.parametrize("nth", range(SEVERAL))
def test_each_of_several_completions_is_as_with_one_engine(found, nth):
    mine, theirs = found["several"][nth]["outputs"], found["single several"][nth]
    assert len(mine) == len(theirs) == 3
    for one, other in zip(mine, theirs, strict=True):
        assert same_receipt(one["receipt"], other["receipt"], 1e-5)
        assert one["receipt"]["status"] == "ok"
        assert_close(one["activations"], other["activations"])
        assert_close(one["probes"], other["probes"])


def test_all_completions_of_a_call_run_on_the_replica_that_has_room_for_it(found):
    assert [len(sent) for sent in found["several sent"]] == [3] * SEVERAL
    assert all(len(set(sent)) == 1 for sent in found["several sent"])
    assert {sent[0] for sent in found["several sent"]} == {0, 1}


def test_all_inputs_of_a_session_go_to_one_replica_and_count_on(found):
    for nth, session in enumerate(found["sessions"]):
        sent = found["session sent"][nth]
        assert len(set(sent)) == 1
        assert session["receipt"]["status"] == "ok"
        assert len(session["rows"]) == 9
        assert_close(session["rows"], found["single sessions"][nth])
    assert {sent[0] for sent in found["session sent"]} == {0, 1}


def test_calls_that_are_given_up_leave_nothing_behind_on_any_replica(found):
    # That nothing is left was checked on all workers; see `check_integrity`.
    assert found["cancelled"] == ["CancelledError"] * 12
    assert all(reason == "abort" and count for reason, count in found["aborted"])


def test_server_wide_edits_by_name_reach_requests_on_each_replica(found):
    for nth, mine in enumerate(found["steered"]):
        edited = mine["receipt"]["edited"]
        assert edited["applied"] == edited["expected"] == rows(nth) + len(mine["generated"]) - 1
    assert {where for [where] in found["steered sent"]} == {0, 1}
    assert found["unsteered"]["receipt"] is None
    assert found["unsteered"]["generated"] == found["single"][0]["generated"]


def test_when_one_replica_dies_every_call_ends_with_an_error(found):
    # vLLM raises `Exception` for an RPC that the dying replica answers with a failure.
    assert len(found["lost"]) == 4
    assert set(found["lost"]) <= {"EngineDeadError", "Exception"}


@pytest.fixture(scope="module")
def server(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    options = (f"--sites={','.join(ALL_SITES)}", "--data-parallel-size=2", "--max-num-seqs=16")
    with serving.running(serving.command(talking_llama, *options), folder, **NOBIND) as running:
        yield running


@pytest.mark.nightly
def test_a_server_of_two_replicas_answers_each_request_as_one_engine_does(found, server):
    def ask(nth: int) -> Any:
        asked = plan(nth)
        with Client(server.url) as client:
            return client.complete(
                prompt(nth)["prompt_token_ids"],
                model=NAME,
                temperature=0,
                max_tokens=5 + nth % 7,
                ignore_eos=True,
                **asked,
            )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(24)))
    for nth, answer in enumerate(answers):
        [mine], theirs = answer.outputs, found["single"][nth]
        if theirs["receipt"] is None:
            assert mine.receipt is None
            continue
        assert same_receipt({**mine.receipt.to_dict(), "request_id": ""}, theirs["receipt"], 1e-5)
        if theirs["activations"] is not None:
            got = mine.activations
            rows_of = {tap: (got[tap], got.positions_of(*tap)) for tap in got}
            assert_close(rows_of, theirs["activations"])
    workers = server.wait_until_idle()["workers"]
    assert [worker["replica"] for worker in workers] == [0, 1]
    assert all(worker["steps"]["active"] > 0 for worker in workers)
    metrics = serving.httpx.get(server.url + "/metrics").text
    for place in ("0.0.0", "1.0.0"):
        assert f'midstream:active_steps_total{{worker="{place}"}}' in metrics
