"""Captured rows in sinks of the async engine: each request waits for its own, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.own_process import python
from helpers.sinks_async import COUNT, prompt


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sinks-async")
    python("-m", "helpers.sinks_async", tiny_llama, folder, timeout=580)
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
    assert mine["kept"] == dict.fromkeys(("memory", "store", "keeping"), ("ok", ""))
    length = len(prompt(nth)["prompt_token_ids"])
    assert mine["generated"] == 4 + nth % 4
    for rows, positions, ids in mine["memory"].values():
        assert len(rows) == length + mine["generated"] - 1
        assert positions.tolist() == list(range(len(rows)))
        assert ids[:length].tolist() == prompt(nth)["prompt_token_ids"]
    assert_same(mine["store"], mine["memory"])
    assert_same(mine["keeping"], mine["memory"])


def test_requests_that_end_together_share_a_shard(found):
    assert 1 <= found["shards"] <= COUNT / 3


def test_a_sink_that_fails_is_its_own_requests_error(found):
    bad, well, unknown = found["failed"]
    kind, (message, outputs) = bad
    assert kind == "ReceiptError"
    assert "sink failing: OSError: [Errno 28] No space left on device" in message
    assert outputs == [{"failing": ("error", "OSError: [Errno 28] No space left on device")}]
    assert well == ("ok", {"store": ("ok", "")})
    assert unknown[0] == "SpecError"
    assert unknown[1][0].startswith("capture.sink: this engine has no sink 'nowhere'")


def test_a_slow_sink_keeps_its_own_requests_waiting_and_no_others(found):
    assert found["passing"] == ("ok", {"store": ("ok", "")})
    assert not found["slow is done"]
    assert found["slow"] == ("ok", {"keeping": ("ok", "")})


def test_of_a_request_that_did_not_end_nothing_is_kept(found):
    assert found["aborted"] == ("abort", None)
    assert found["ended"] == [("whole", 7 + 100 - 1)]


def test_a_session_of_streaming_input_is_kept_whole_at_its_end(found):
    memory, keeping, kept = found["session"]
    assert_same(keeping, memory)
    assert set(kept) == {"memory", "keeping"}
    # Of the first turn's three tokens the last was never fed.
    (positions,) = [positions for _, positions, _ in memory.values()]
    assert len(positions) == 5 + 2 + 6 + 2


def test_the_engines_end_closes_its_sinks(found):
    assert found["closed"] == "close"
