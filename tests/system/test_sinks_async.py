"""Captured rows in sinks of the async engine: each request waits for its own, and for no other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_process import python
from system.sinks_async import COUNT, NAMES, prompt


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sinks-async")
    python("-m", "system.sinks_async", tiny_llama, folder, timeout=580)
    loaded: dict[str, Any] = torch.load(folder / "found.pt")
    return loaded


def assert_same(mine: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    assert list(mine) == list(theirs)
    for tap, values in theirs.items():
        for ours, other in zip(mine[tap], values, strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("nth", range(COUNT))
def test_each_of_many_at_once_has_its_rows_in_every_sink(found, nth):
    mine = found["many"][nth]
    assert mine["receipt"]["status"] == "ok"
    assert mine["kept"] == dict.fromkeys(NAMES, ("ok", ""))
    length = len(prompt(nth)["prompt_token_ids"])
    assert mine["generated"] == 4 + nth % 4
    for rows, positions, ids in mine["memory"].values():
        assert len(rows) == length + mine["generated"] - 1
        assert positions.tolist() == list(range(len(rows)))
        assert ids[:length].tolist() == prompt(nth)["prompt_token_ids"]
    assert_same(mine["store"], mine["memory"])
    assert_same(mine["keeping"], mine["memory"])
    assert_same(mine["rows"], mine["memory"])


def test_rows_come_in_pieces_while_requests_run(found):
    assert sum(mine["pieces"] for mine in found["many"]) > 2 * COUNT


def test_requests_that_end_together_share_a_shard(found):
    assert 1 <= found["shards"] <= COUNT / 3


def test_a_slow_sink_keeps_its_own_requests_waiting_and_no_others(found):
    assert found["passing"] == ("ok", {"store": ("ok", "")})
    assert not found["slow is done"]
    assert found["slow"] == ("ok", {"keeping": ("ok", "")})


def test_a_session_of_streaming_input_is_kept_whole_at_its_end(found):
    memory, keeping, kept = found["session"]
    assert_same(keeping, memory)
    assert set(kept) == {"memory", "keeping", "rows"}
    rows, pieces = found["session pieces"]
    assert_same(rows, memory)
    assert pieces == 1
    # Of the first turn's three tokens the last was never fed.
    (positions,) = [positions for _, positions, _ in memory.values()]
    assert len(positions) == 5 + 2 + 6 + 2


def test_the_engines_end_closes_its_sinks(found):
    assert found["closed"] == "close"


def test_of_eight_requests_that_give_their_rows_one_id_one_runs_and_the_others_are_told(found):
    taken = "capture.request_id: a running request stores rows under the id 'mine'"
    assert [status.partition(";")[0] for status in sorted(found["named"])] == [taken] * 7 + ["ok"]
    # Nothing of the others was computed.
    assert (found["named, computed"], found["named, aborted"]) == (1, 0)
    assert "has 'mine' already" in found["named again"]


def test_an_id_is_free_again_when_the_caller_of_its_request_has_left(found):
    assert "a running request" in found["named by one that runs"]
    assert found["named by one that left"] == "ok"
