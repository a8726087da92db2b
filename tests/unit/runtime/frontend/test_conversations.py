"""What is kept of conversations between requests, and what a request recalls of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from midstream.errors import SpecError
from midstream.ops.layout import OPEN
from midstream.runtime.frontend.conversations import Conversations
from midstream.spec import Gate, Plan, Steer
from midstream.spec.operations.gate_memory import ScanStart

PROMPT = [4, 9, 2]
ROWS = [*PROMPT, 7, 8]


def request(prompt=PROMPT, salt=None, n=1):
    return SimpleNamespace(
        prompt_token_ids=prompt, cache_salt=salt, sampling_params=SimpleNamespace(n=n)
    )


def plan(*holds):
    return Plan.make(None, [Gate(Steer([1.0], 0), [1.0], hold=one) for one in holds])


def recalled(table, prompt=PROMPT, salt=None):
    return table.of(request(prompt, salt), plan("conversation:a"))


def leave(table, last, rows=ROWS, prompt=PROMPT, salt=None, gate="g"):
    """Let a request begin and end with this state."""
    mine = recalled(table, prompt, salt)
    mine.keep([("a", gate, mine.start("a", gate), last)], rows)
    return mine


def test_only_requests_whose_gates_hold_for_a_conversation_recall_anything():
    table = Conversations()
    assert table.of(request(), None) is None
    assert table.of(request(n=3), plan("rest", 4)) is None
    assert table.of(request(), plan(2, "conversation:a")) is not None
    with pytest.raises(SpecError, match="one completion, and n is 2; use n=1") as caught:
        table.of(request(n=2), plan(2, "conversation:a"))
    assert caught.value.path == "edits[1].hold"


def test_a_prompt_that_goes_on_has_the_state_beyond_the_rows_of_the_request_before():
    table = Conversations()
    first = leave(table, 0.5)
    assert first.start("a", "g") == ScanStart(0, None, None)
    assert first.is_new("a", "g")
    for more in ([], [1, 2]):
        later = recalled(table, [*ROWS, *more])
        assert later.start("a", "g") == ScanStart(5, None, 0.5)
        assert not later.is_new("a", "g")


@pytest.mark.parametrize("prompt", [ROWS[:4], [4, 9, 2, 7, 6, 1], [1, *ROWS], None])
def test_a_prompt_that_does_not_begin_with_these_rows_has_the_state_from_its_first_token(prompt):
    table = Conversations()
    leave(table, 0.5)
    assert recalled(table, prompt).start("a", "g") == ScanStart(0, None, 0.5)


def test_earlier_rows_start_where_the_first_request_that_had_them_did():
    table = Conversations()
    leave(table, 0.5)
    other = [3, 3]
    leave(table, 2.0, [*other, 1], other)
    later = leave(table, OPEN, [*other, 1, 5, 6], [*other, 1, 5])
    assert later.start("a", "g") == ScanStart(3, 0.5, 2.0)
    assert recalled(table, [*other, 1, 5, 6]).start("a", "g") == ScanStart(5, 0.5, OPEN)


def test_all_versions_of_a_request_recall_the_same():
    table = Conversations()
    mine = recalled(table)
    assert mine.start("a", "g") == ScanStart()
    leave(table, 0.5)
    assert mine.start("a", "g") == ScanStart()
    assert mine.is_new("a", "g")


def test_embeddings_are_never_gone_on_with():
    table = Conversations()
    leave(table, 0.5, [0, 0, 1], None)
    assert recalled(table, [0, 0, 1]).start("a", "g") == ScanStart(0, None, 0.5)


def test_gates_and_cache_salts_have_states_of_their_own_and_those_used_last_are_kept():
    table = Conversations(most=3)
    leave(table, 0.25, gate="g")
    leave(table, 0.5, gate="h")
    leave(table, 0.75, salt="theirs")
    assert recalled(table).start("a", "g").after == 0.25
    assert recalled(table).start("a", "h").after == 0.5
    assert recalled(table, salt="theirs").start("a", "g").after == 0.75
    assert recalled(table).start("a", "g").after == 0.25  # used again: `h` was used before it
    leave(table, 1.0, gate="i")
    assert len(table) == 3
    found = {gate: recalled(table).start("a", gate).after for gate in ("g", "h", "i")}
    assert found == {"g": 0.25, "h": None, "i": 1.0}


def test_two_processes_of_a_server_share_states_through_a_file(tmp_path):
    here, there = Conversations(most=3), Conversations(most=3)
    leave(here, 0.125, gate="before")
    for table in (here, there):
        table.share(tmp_path / "states")
    assert recalled(there).start("a", "before") == ScanStart(), "it was in memory"
    leave(here, 0.5)
    later = recalled(there, [*ROWS, 1])
    assert later.start("a", "g") == ScanStart(5, None, 0.5)
    later.keep([("a", "g", later.start("a", "g"), OPEN)], [*ROWS, 1, 2])
    assert recalled(here, [*ROWS, 1, 2]).start("a", "g") == ScanStart(7, None, OPEN)
    for nth, table in enumerate([here, there, here]):
        leave(table, 0.5, gate=f"h{nth}")
    assert len(here) == len(there) == 3
    assert recalled(there).start("a", "g") == ScanStart(), "it was used longest ago"


def test_many_threads_of_two_processes_lose_no_state(tmp_path):
    tables = [Conversations(), Conversations()]
    for table in tables:
        table.share(tmp_path / "states")

    def turns(nth):
        for turn in range(20):
            leave(tables[(nth + turn) % 2], float(turn), gate=f"g{nth}")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(turns, range(6)))
    found = [recalled(tables[nth % 2]).start("a", f"g{nth}").after for nth in range(6)]
    assert found == [19.0] * 6


def test_a_client_with_another_key_has_conversations_of_its_own():
    table = Conversations()
    mine = table.of(request(), plan("conversation:a"), "me")
    mine.keep([("a", "g", mine.start("a", "g"), 0.5)], ROWS)
    found = [
        table.of(request(), plan("conversation:a"), owner).start("a", "g").after
        for owner in ("me", "you", "")
    ]
    assert found == [0.5, None, None]
