"""The planner against a reader of plans that goes row by row."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_steps import TAPS, captures_at, covers, make_buffers, view_of
from support.plans import VECTORS, plan_of, random_plan, rows
from support.programs import assert_free, assert_program

from midstream.ops import layout
from midstream.ops.layout import Flags
from midstream.runtime.protocol.segments import (
    APPLIED_0,
    CACHED,
    MOST_APPLIED,
    UNSEEN,
    WHOLE,
    TapProgramStep,
    cut,
)
from midstream.runtime.worker.request_state import RequestState, acquire_segments, release_segments
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

EVERYWHERE = ((0, None),)
# A plan may name taps of other ranks.
ELSEWHERE = ("resid_mid", 7)
STEER = plan_of(edits=[(("resid_post", 0), VECTORS[1], 1.0, EVERYWHERE)])
plans = st.integers(0, 2**32).map(
    lambda seed: random_plan(random.Random(seed), 30, (*TAPS, ELSEWHERE))
)


def planner_of(tables, max_model_len=100):
    """A planner, and its slots."""
    slots = SlotTable(max_model_len)
    return StepPlanner(slots, tables), slots


def active_rows(step):
    """The rows of a step that have a program."""
    return np.arange(len(step.tokens))[step.active].tolist()


def request_of(name, plan, tables, slots):
    """A running request."""
    codecs = CodecTable(make_buffers())
    segments = acquire_segments(cut(plan, TAPS, WHOLE), tables, CapturedRowIndex(), codecs)
    request = RequestState(name, "u", plan, slots.new_slot(), segments)
    slots.add(request)
    return request


def wanted_edits(plan, position):
    """What a token's program must hold: edits as far as its id allows, then probes."""
    found = []
    for edit in plan.edits:
        tap = TAPS.get((edit.site, edit.layer))
        if tap is None:
            continue
        steps, digest = edit.steps.instructions, edit.steps.digest
        if covers(edit.where.ranges, position):
            found.append(TapProgramStep(tap, steps, digest))
        for match in edit.where.matches:
            if covers(match.ranges, position):
                found.append(TapProgramStep(tap, steps, digest, match.ids, match.others))
    for probe in plan.probes:
        tap = TAPS.get((probe.site, probe.layer))
        if tap is not None and covers(probe.where.possible, position):
            found.append(TapProgramStep(tap, probe.steps.instructions, probe.steps.digest))
    return tuple(found)


@settings(max_examples=100)
@given(
    plans=st.lists(st.one_of(st.none(), plans), min_size=1, max_size=5),
    chunks=st.lists(st.lists(st.integers(0, 7), min_size=5, max_size=5), min_size=1, max_size=6),
)
def test_every_row_of_every_step_gets_what_its_request_asks_for_at_its_position(plans, chunks):
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    planner, slots = planner_of(tables, 200)
    requests = {
        f"r{nth}": request_of(f"r{nth}", plan, tables, slots)
        for nth, plan in enumerate(plans)
        if plan is not None
    }
    computed = [0] * len(plans)
    for chunk in chunks:
        batch = [nth for nth in range(len(plans)) if chunk[nth] > 0]
        if not batch:
            continue
        view = view_of(
            [f"r{nth}" for nth in batch],
            [chunk[nth] for nth in batch],
            [computed[nth] for nth in batch],
        )
        step = planner.plan(view)
        check_step(step, view, plans, buffers)
        for nth in batch:
            computed[nth] += chunk[nth]
    for request in requests.values():
        release_segments(request.segments, tables)
        slots.remove([request])
    assert_free(tables)
    assert len(slots) == 0


def check_step(step, view, plans, buffers):
    tokens = np.zeros((view.num_tokens, 4), np.int32) if step is None else step.tokens
    active = {} if step is None else {int(row): nth for nth, row in enumerate(active_rows(step))}
    taken: set[int] = set()
    row = by_id = scored = 0
    for name, count, first in zip(view.request_ids, view.scheduled, view.computed, strict=True):
        plan = plans[int(name[1:])]
        for position in range(first, first + count):
            program, group, record, told = tokens[row].tolist()
            edits = () if plan is None else wanted_edits(plan, position)
            taps = {tap for tap in TAPS if plan is not None and captures_at(plan, tap, position)}
            assert (program != 0) == bool(edits or taps) == (row in active)
            if program:
                assert_program(buffers, program, edits)
                places = {
                    tap: int(buffers.table[index, group, layout.PLACE])
                    for tap, index in TAPS.items()
                }
                assert {tap for tap, place in places.items() if place} == taps
                assert (record > 0) == bool(taps)
                rows = {record - 1 + place - 1 for place in places.values() if place}
                assert len(rows) == len(taps)
                assert not rows & taken, "two vectors would land in one row of the ring"
                taken |= rows
                nth = active[row]
                counts = [(edit.counted, bool(edit.ids)) for edit in edits]
                assert step.most[nth] == sum(counted for counted, _ in counts)
                assert step.fewest[nth] == sum(counted for counted, listed in counts if not listed)
                assert (step.positions[nth], step.captures[nth]) == (position, len(taps))
                by_id |= any(listed for _, listed in counts)
                scored |= any(
                    probe.name
                    and (probe.site, probe.layer) in TAPS
                    and covers(probe.where.possible, position)
                    for probe in plan.probes
                )
            flags = [one.flags for edit in edits for one in edit.steps]
            assert told == (position if any(Flags.ROW_BY_POSITION in each for each in flags) else 0)
            row += 1
    if step is not None:
        assert taken == set(range(step.num_units))
        assert (step.by_id, step.scored) == (bool(by_id), bool(scored))


def test_a_cache_hit_after_preemption_marks_only_what_was_never_computed():
    tables = ProgramTable(make_buffers())
    planner, slots = planner_of(tables)
    plan = plan_of(edits=[(("resid_post", 0), VECTORS[1], 1.0, ((4, 40),))])
    request, other = (request_of(name, plan, tables, slots) for name in "ab")
    # Rows that ask for nothing are computed all the same.
    for computed, scheduled in [(0, 6), (16, 4), (10, 12)]:
        step = planner.plan(view_of(["b", "a"], [1, scheduled], [computed] * 2))
        count = len(step.slots)
        slots.record(step, np.ones(count, np.int64), np.zeros(count, bool))
    slots.remove([request])
    slots.remove([other])
    once = APPLIED_0 + 1
    # The second run began at 16; the third, at 10, computed what the cache had served as well.
    assert request.done.tolist() == [UNSEEN] * 4 + [once] * 2 + [CACHED] * 4 + [once] * 12
    assert other.done.tolist() == [UNSEEN] + [CACHED] * 9 + [once] + [CACHED] * 5 + [once]


def test_rows_without_work_in_decode_steps_like_the_last_were_computed_and_not_cached():
    tables = ProgramTable(make_buffers())
    planner, slots = planner_of(tables)
    late = plan_of(edits=[(("resid_post", 0), rows(1, 4), ((12, 16),))])
    working, idle = request_of("a", STEER, tables, slots), request_of("b", late, tables, slots)
    for position in (5, 6, 7, 9, 10):
        step = planner.plan(view_of(["a", "b"], [1, 1], [position, position]))
        slots.record(step, np.ones(1, np.int64), np.zeros(1, bool))
    slots.remove([working, idle])
    assert idle.done.tolist() == [CACHED] * 5 + [UNSEEN] * 3 + [CACHED] + [UNSEEN] * 2
    once = APPLIED_0 + 1
    assert working.done.tolist() == [CACHED] * 5 + [once] * 3 + [CACHED] + [once] * 2


def test_edits_by_position_are_laid_out_once_for_decode_steps_and_get_their_positions():
    tables = ProgramTable(make_buffers())
    planner, slots = planner_of(tables)
    by_position = plan_of(edits=[(("resid_post", 0), rows(12, 4), ((4, 16),))])
    other = request_of("s", STEER, tables, slots)
    first, second = (request_of(name, by_position, tables, slots) for name in "ab")
    laid_out, before = [], None
    for a, b in [(4, 7), (5, 8), (6, 9), (9, 10), (10, 11)]:
        step = planner.plan(view_of(["a", "plain", "s", "b"], [1, 1, 1, 1], [a, 3, 2 * a, b]))
        if a == 4:  # both enter the segment of their edit
            continue
        assert step.tokens[:, layout.POSITION].tolist() == [a, 0, 0, b]
        assert (step.tokens[:, layout.PROGRAM] != 0).tolist() == [True, False, True, True]
        assert step.positions.tolist() == [a, 2 * a, b]
        assert before is None or step.tokens is not before.tokens
        laid_out.append(step.runs.row)
        before = step
    assert all(row is laid_out[0] for row in laid_out)
    for request in (other, first, second):
        slots.remove([request])


def test_a_count_too_large_to_be_told_stays_the_largest():
    tables = ProgramTable(make_buffers())
    planner, slots = planner_of(tables)
    request = request_of("a", STEER, tables, slots)
    step = planner.plan(view_of(["a"], [2], [0]))
    slots.record(step, np.array([2**20, 3]), np.zeros(2, bool))
    slots.remove([request])
    assert request.done.tolist() == [MOST_APPLIED, APPLIED_0 + 3]


def test_a_request_that_comes_under_an_id_of_an_unchanged_batch_is_seen():
    # The ids of a batch are looked up once for as long as they stay the same.
    tables = ProgramTable(make_buffers())
    planner, slots = planner_of(tables)
    other = request_of("other", STEER, tables, slots)
    view = view_of(["a", "other"], [1, 1], [0, 0])
    assert active_rows(planner.plan(view)) == [1]
    mine = request_of("a", STEER, tables, slots)
    assert sorted(active_rows(planner.plan(view))) == [0, 1]
    slots.remove([mine])
    slots.remove([other])
    assert planner.plan(view) is None
