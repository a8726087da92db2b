"""Rows of earlier requests, against a model whose rows follow from tokens and edits alone."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plans import SMALL, plan_of

from midstream.codecs import Raw
from midstream.plan import Between, Capture, Gate, ModelShape, Plan, Prompt, Steer
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.frontend.row_reuse import ReusedRows
from midstream.runtime.frontend.row_store import CHUNK, RowSet, RowStore
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.results import ResultBlock
from midstream.runtime.protocol.runs import expand

TAPS = [("resid_post", 0), ("resid_post", 1), ("attn_out", 1)]
ORIGIN = b"model"


def row(tap: Any, tokens: list[int], edited: list[int]) -> list[int]:
    """The 4 bytes of a row: of its tap, and of the tokens and edits up to it."""
    return list(hashlib.sha256(repr((tap, tokens, edited)).encode()).digest()[:4])


def rows(taps: Any, tokens: list[int], start: int | None, positions: Any) -> torch.Tensor:
    """uint8 [positions, taps, 4]; tokens from `start` on are edited."""
    edits = [] if start is None else list(range(start, len(tokens)))

    def edited(position: int) -> list[int]:
        return [one for one in edits if one <= position]

    found = [
        [row(tap, tokens[: position + 1], edited(position)) for tap in taps]
        for position in positions
    ]
    return torch.tensor(found, dtype=torch.uint8).view(len(positions), len(taps), 4)


@st.composite
def requests(draw: Any) -> Any:
    """(tokens, how many of them are the prompt, first edited position, captures, hit)."""
    tokens = [draw(st.integers(0, 2))] * draw(st.integers(1, 40))
    tokens += [draw(st.integers(0, 2))] * draw(st.integers(1, 40))
    prompt = draw(st.integers(1, len(tokens)))
    start = draw(st.sampled_from([None, None, 0, 20, 33]))
    ranges = st.sampled_from([((0, None),), ((0, 40),), ((17, None),), ((3, 7), (30, 50))])
    captures = [
        (draw(st.lists(st.sampled_from(TAPS), min_size=1, unique=True)), draw(ranges))
        for _ in range(draw(st.integers(1, 2)))
    ]
    reuse = draw(st.sets(st.integers(0, len(captures) - 1), min_size=1))
    return tokens, prompt, start, captures, frozenset(reuse), draw(st.floats(0, 1))


@given(st.lists(requests(), min_size=1, max_size=12), st.sampled_from([0, 300, 2000, 1 << 20]))
def test_no_hit_below_the_first_read_position_lacks_a_row(asked: Any, budget: int) -> None:
    """Whatever a hit below it, kept rows and computed ones are all rows, each once, and right."""
    store = RowStore(budget)
    for tokens, prompt, start, captures, reuse, share in asked:
        edits = [] if start is None else [(TAPS[0], SMALL[0], 1.0, [(start, None)])]
        plan = plan_of(edits, captures)
        reused = ReusedRows(store, plan, reuse, cache_keys(plan), ORIGIN, tokens[:prompt])
        first = reused.find().first_read
        most = prompt - 1 if first is None else min(first, prompt - 1)
        hit = int(share * most)
        computed = []
        for group, taps in plan.alike:
            there = expand(plan.ranges_of(group, len(tokens), tokens))
            mine = there[there >= hit]
            values = rows(taps, tokens, start, mine.tolist())
            # As they come from several steps.
            cut = mine.size // 3
            chunks = [each for each in (values[:cut], values[cut:]) if len(each)]
            if mine.size:
                computed.append(ResultBlock(list(taps), Raw(), mine, chunks))
        kept = reused.missing(computed, tokens)
        found: dict[Any, dict[int, Any]] = {}
        for block in [*computed, *kept]:
            values = torch.cat(list(block.chunks))
            for place, tap in enumerate(block.taps):
                for nth, position in enumerate(block.positions.tolist()):
                    assert position not in found.setdefault(tap, {})
                    found[tap][position] = values[nth, place].tolist()
        for group, taps in plan.alike:
            there = expand(plan.ranges_of(group, len(tokens), tokens)).tolist()
            wanted = rows(taps, tokens, start, there)
            for place, tap in enumerate(taps):
                mine = {position: wanted[nth, place].tolist() for nth, position in enumerate(there)}
                assert found.get(tap, {}) == mine
        reused.keep(computed, tokens, 0)
        assert store.used <= budget
        assert store.used == sum(
            one.rows.nbytes for chunk in store._chunks.values() for one in chunk.sets
        )


def test_a_prompt_of_which_all_rows_are_kept_has_no_first_read_position_in_it() -> None:
    store = RowStore(1 << 20)
    tokens = list(range(50))
    plan = plan_of([], [(TAPS[:2], [(0, None)])])

    def ask() -> ReusedRows:
        return ReusedRows(store, plan, frozenset([0]), cache_keys(plan), ORIGIN, tokens)

    first = ask()
    assert first.find().first_read == 0
    first.keep([ResultBlock(TAPS[:2], Raw(), np.arange(50), [torch.zeros(50, 2, 4)])], tokens, 0)
    assert ask().find().first_read == 48
    # Rows of other edits, or of another model, are others.
    edited = plan_of([(TAPS[0], SMALL[0], 1.0, [(20, None)])], [(TAPS[:2], [(0, None)])])
    keys = cache_keys(edited)
    assert ReusedRows(store, edited, frozenset([0]), keys, ORIGIN, tokens).find().first_read == 16
    other = ReusedRows(store, plan, frozenset([0]), cache_keys(plan), b"adapter", tokens)
    assert other.find().first_read == 0


def test_what_a_gate_with_memory_reads_is_served_where_its_memory_is_kept() -> None:
    shape = ModelShape(2, 3, TAPS)
    gate = Gate(Steer([1.0] * 3, 1, positions=slice(20, None)), [1.0] * 3, hold=2)
    tokens, store = list(range(40)), RowStore(1 << 20)
    capture = Capture(1, positions=slice(30, None))
    plan = resolve(Plan.make(capture, gate), shape, Prompt(len(tokens)), 4)
    keys = cache_keys(plan)
    assert keys.first_read == 30
    assert [(kept.ranges, kept.memory) for kept in keys.scores] == [
        (((20, None),), number) for number in (1, 2)
    ]
    reused = ReusedRows(store, plan, frozenset([0]), keys, ORIGIN, tokens)
    assert reused.find().first_read == 30


def test_what_marks_select_is_computed_where_all_rows_are_kept() -> None:
    """After a preemption the cache has generated tokens, which an automaton must read again."""
    edit = Steer([1.0] * 3, 1, positions=Between([5], [7]))
    capture, store = Capture([0, 1], positions=slice(0, 32)), RowStore(1 << 20)
    tokens = list(range(32))
    asked = Plan.make(capture, edit)
    plan = resolve(asked, ModelShape(2, 3, TAPS), Prompt(32, tuple(tokens)), 4)
    keys = cache_keys(plan)

    def ask() -> ReusedRows:
        return ReusedRows(store, plan, frozenset([0]), keys, ORIGIN, tokens)

    kept = [ResultBlock(TAPS[:2], Raw(), np.arange(32), [torch.zeros(32, 2, 4)])]
    assert ask().find().first_read == 0
    ask().keep(kept, tokens, 0)
    assert ask().find().first_read == 32


def test_kept_rows_beyond_a_missing_one_are_not_counted() -> None:
    store = RowStore(1 << 20)
    tokens = list(range(64))
    some = plan_of([], [(TAPS[:1], [(0, 16), (32, 48)])])
    first = ReusedRows(store, some, frozenset([0]), cache_keys(some), ORIGIN, tokens)
    first.find()
    positions = np.array([*range(16), *range(32, 48)])
    first.keep([ResultBlock(TAPS[:1], Raw(), positions, [torch.zeros(32, 1, 4)])], tokens, 0)
    every = plan_of([], [(TAPS[:1], [(0, None)])])
    later = ReusedRows(store, every, frozenset([0]), cache_keys(every), ORIGIN, tokens)
    assert later.find().first_read == 16


def test_rows_of_before_a_reset_are_dropped_and_rows_that_end_late_are_not_kept() -> None:
    store = RowStore(1 << 20)

    def rows_of(value: int) -> RowSet:
        values = torch.full((CHUNK, 1, 4), value, dtype=torch.uint8)
        return RowSet((TAPS[0],), "raw", (1 << CHUNK) - 1, values)

    store.add(b"a", rows_of(1), 0)
    store.see(1)
    assert (len(store), store.used) == (0, 0)
    store.add(b"a", rows_of(1), 0)
    assert not store.has(b"a", [TAPS[0]], 1, "raw")
    store.add(b"a", rows_of(2), 1)
    store.see(0)
    assert store.has(b"a", [TAPS[0]], 1, "raw")
    assert not store.has(b"a", [TAPS[0]], 1, "full8")
    assert not store.has(b"a", TAPS[:2], 1, "raw")


def test_the_least_recently_used_rows_go_first_and_of_a_request_the_last() -> None:
    size = CHUNK * 4
    store = RowStore(3 * size)
    rows = RowSet((TAPS[0],), "raw", (1 << CHUNK) - 1, torch.zeros(CHUNK, 1, 4, dtype=torch.uint8))
    for key in (b"a", b"b", b"c"):
        store.add(key, rows, 0)
    store.use([b"a", b"b"])
    store.add(b"d", rows, 0)
    assert [key for key in (b"a", b"b", b"c", b"d") if store.has(key, rows.taps, 1, "raw")] == [
        b"a",
        b"b",
        b"d",
    ]
    store.add(b"e", rows, 0)
    assert not store.has(b"b", rows.taps, 1, "raw")


@pytest.mark.parametrize(("resets", "expected"), [(0, 8), (1, 0)])
def test_kept_rows_count_only_as_long_as_the_prefix_cache_is_not_reset(resets, expected):
    from midstream.runtime.protocol.request_payload import ReusableRows

    plan = plan_of([], [([TAPS[0]], [(0, None)])])
    payload = RequestPayload("r", to_bytes(plan), cache_keys(plan), kept=ReusableRows(0, 8))
    assert payload.first_read(resets) == expected
