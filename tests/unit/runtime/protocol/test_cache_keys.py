import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import SMALL, add, gated, plan_of, random_plan

from midstream.plan import (
    Between,
    Capture,
    Gate,
    ModelShape,
    Plan,
    Probe,
    Prompt,
    ResolvedPlan,
    Steer,
    Where,
)
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.protocol.cache_keys import CacheKeys, ChangedKeys, cache_keys

TAP, LATER = ("resid_post", 0), ("resid_post", 1)
SHAPE = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)])
LENGTH = 24
DIGEST = "714dd6c9328bae1b99a4a2ac76856072eb57b02dee7d96a283f415fafb39dfc9"


def _asked(plan: ResolvedPlan, position: int) -> list[object]:
    """What changes the computation at a position, looked up one edit at a time."""
    found: list[object] = []

    def has(ranges):
        return any(a <= position and (b is None or position < b) for a, b in ranges)

    for edit in plan.edits:
        content = (edit.site, edit.layer, edit.steps.digest)
        found += [content] if has(edit.where.ranges) else []
        found += [
            (*content, match.ids, match.others) for match in edit.where.matches if has(match.ranges)
        ]
    for probe in plan.probes:
        if not probe.name and has(probe.where.possible):
            found.append((probe.site, probe.layer, probe.steps.digest))
    return found


@given(st.integers(0, 10**9), st.integers(0, LENGTH - 1), st.integers(1, 16))
@settings(max_examples=rounds(suite=200, nightly=1600))
def test_a_block_is_plain_exactly_where_none_of_its_tokens_is_edited(seed, start, size):
    plan = random_plan(random.Random(seed), LENGTH) or plan_of()
    asked = [_asked(plan, position) for position in range(start, start + size)]
    key = cache_keys(plan).of_block(start, start + size)
    assert (key is None) == (not any(asked))


@given(st.integers(0, 10**9), st.integers(0, LENGTH - 1), st.integers(1, 16), st.data())
@settings(max_examples=rounds(suite=300, nightly=2400))
def test_two_plans_share_a_block_exactly_if_they_do_the_same_to_each_of_its_tokens(
    seed, start, size, data
):
    draw = random.Random(seed)
    one = random_plan(draw, LENGTH) or plan_of()
    # Another plan that is often alike in part: some edits left out, moved, or added.
    other = random_plan(draw, LENGTH) or plan_of()
    kept = tuple(edit for edit in one.edits if data.draw(st.booleans()))
    added = other.edits if data.draw(st.booleans()) else ()
    gates = one.probes if data.draw(st.booleans()) else ()
    other = ResolvedPlan(one.prompt_len, kept + added, other.captures, gates)
    stop = start + size
    same = all(_asked(one, position) == _asked(other, position) for position in range(start, stop))
    keys = [cache_keys(plan).of_block(start, stop) for plan in (one, other)]
    assert (keys[0] == keys[1]) == same


@given(st.integers(0, 10**9), st.integers(0, LENGTH + 4))
def test_the_first_edited_position_is_found(seed, position):
    plan = random_plan(random.Random(seed), LENGTH) or plan_of()
    edited = [at for at in range(position, 200) if _asked(plan, at)]
    assert cache_keys(plan).first_edited(position) == (edited[0] if edited else None)


@given(st.integers(0, 10**9))
def test_the_first_row_to_compute_is_the_first_that_is_captured(seed):
    plan = random_plan(random.Random(seed), LENGTH) or plan_of()
    wheres = [one.where for one in plan.captures]
    firsts = [
        position
        for where in wheres
        for position in [next((at for at in range(200) if _possible(where, at)), None)]
        if position is not None
    ]
    keys = cache_keys(plan)
    assert keys.first_read == min(firsts, default=None)
    named = {one.slot: one.where for one in plan.probes if one.name}
    assert {score.slot: score.ranges for score in keys.scores} == {
        slot: where.possible for slot, where in named.items() if where.possible
    }


def _possible(where: Where, position: int) -> bool:
    ranges = [*where.ranges, *(each for match in where.matches for each in match.ranges)]
    in_range = any(a <= position and (b is None or position < b) for a, b in ranges)
    return in_range or (where.last_from is not None and position >= where.last_from)


@given(st.integers(0, 10**9))
def test_keys_survive_msgpack(seed):
    keys = cache_keys(random_plan(random.Random(seed), LENGTH) or plan_of())
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(keys))
    assert msgspec.convert(travelled, CacheKeys) == keys


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [[0], ["a"]],
        [[1], ["a"], None],
        [[], [], None],
        [[0, 5, 5], ["a", "", "b"], None],
        [[0, 5, 3], ["a", "", "b"], None],
        [[0], ["a", "b"], None],
        [[0], [7], None],
        [[0], ["a"], "first"],
        [[0], ["a"], None, None],
        [[0, "4"], ["a", "b"], None],
        [[False], ["a"], None],
    ],
)
def test_what_are_no_keys_is_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, CacheKeys)


def test_what_a_gate_remembers_is_in_the_key_and_kept_so_that_it_caps_no_hit():
    def keys(**memory):
        gate = Gate(Steer([1.0] * 3, 1, positions=slice(6, None)), [1.0] * 3, **memory)
        return cache_keys(resolve(Plan.make(None, gate), SHAPE, Prompt(8), 4))

    assert keys().first_read is None
    found = [keys(**one) for one in ({"hold": 2}, {"hold": 3}, {"smooth": 0.5}, {"release": -1})]
    assert [one.first_read for one in found] == [None] * 4
    assert [any(kept.memory for kept in one.scores) for one in [keys(), *found]] == [
        False,
        *[True] * 4,
    ]
    assert len({one.marks for one in [*found, keys()]}) == 5


def test_what_a_gate_reads_is_in_the_key():
    def keys(where):
        edit = (LATER, gated(add(), slot=0, b=0.5), [(0, 8)])
        return cache_keys(plan_of([edit], probes=[("", TAP, where)])).of_block(0, 8)

    assert keys([(0, 8)]) != keys([(0, 7)])


def test_the_order_of_edits_is_in_the_key_and_where_they_came_from_is_not():
    one, other = (TAP, SMALL[0], 1.0, [(0, 8)]), (TAP, SMALL[1], 1.0, [(0, 8)])
    plan = plan_of([one, other])
    key = cache_keys(plan).of_block(0, 8)
    assert key != cache_keys(plan_of([other, one])).of_block(0, 8)
    moved = replace(plan, edits=tuple(replace(edit, source=-1) for edit in plan.edits))
    assert cache_keys(moved).of_block(0, 8) == key


def test_all_that_changes_what_is_computed_changes_the_key():
    def key(edits=None, **changes):
        steer = Steer(**{"vector": [1, 2, 3], "layer": 1, "positions": "prompt", **changes})
        plan = Plan.make(Capture(0), edits or steer, Probe([1, 0, 0], 2))
        return cache_keys(resolve(plan, SHAPE, Prompt(10), 5)).of_block(0, 16)

    gate = Gate(Steer([1, 2, 3], 1, positions="prompt"), Probe([1, 0, 0], 0), threshold=0.5)
    keys = [
        key(),
        key(vector=[1, 2, 4]),
        key(layer=2),
        key(scale=2),
        key(norm="keep"),
        key(norm="match"),
        key(positions=slice(9)),
        key(positions={"tokens": [1]}, phase="generated"),
        key(positions={"tokens": [2]}, phase="generated"),
        key(positions="all", exclude={"tokens": [2]}, phase="generated"),
        key(gate),
        key(Gate(gate.edit, gate.probe, threshold=0.25)),
        key(Gate(gate.edit, Probe([0, 1, 0], 0), threshold=0.5)),
        key(Gate(gate.edit, Probe([1, 0, 0], 1), threshold=0.5)),
        key(Gate(gate.edit, gate.probe, threshold=0.5, sharpness=1.0)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(positions=slice(10)) == key(layer=-3) == key()


def test_the_key_is_the_same_in_every_process():
    plan = resolve(Plan.make(None, Steer([1, 2, 3], 1), None), SHAPE, Prompt(10), 5)
    assert cache_keys(plan).of_block(0, 16) == DIGEST


@given(st.integers(0, 10**9), st.integers(0, LENGTH), st.integers(0, LENGTH))
@settings(max_examples=rounds(suite=100, nightly=800))
def test_after_a_change_each_position_has_the_mark_of_the_plan_that_holds_there(seed, at, then):
    draw = random.Random(seed)
    plans = [cache_keys(random_plan(draw, LENGTH) or plan_of()) for _ in range(3)]
    keys = ChangedKeys(plans[0])
    keys.change(at, plans[1])
    keys.change(then, plans[2])

    def mark(of, position):
        return of.of_block(position, position + 1)

    for position in range(LENGTH + 2):
        nth = 2 if position >= then else 1 if position >= at else 0
        assert mark(keys, position) == mark(plans[nth], position)
    assert keys.first_read == plans[0].first_read


def test_an_edit_between_marks_has_keys_from_the_first_generated_token_and_that_is_computed():
    """The prefix cache serves no token in which marks must be found."""

    def keys(prompt, *marks):
        steer = Steer([1.0, 0, 0], 0, positions=Between(*marks))
        return cache_keys(resolve(Plan(edits=(steer,)), SHAPE, Prompt(len(prompt), prompt), 20))

    one = keys((5, 1, 6, 1), 5, 6)
    assert one.first_read == 4
    assert one.starts == (0, 1, 2, 4)
    assert [bool(mark) for mark in one.marks] == [False, True, False, True]
    assert keys((5, 1, 6, 1), 5, 6) == one
    # Other marks, or the same in a prompt that ends between them, are other keys.
    others = keys((5, 1, 6, 1), 5, 7), keys((5, 1, 5, 1), 5, 6), keys((5, 1, 6, 1), 5, [6, 7])
    assert len({one.marks[-1], *(other.marks[-1] for other in others)}) == 4
