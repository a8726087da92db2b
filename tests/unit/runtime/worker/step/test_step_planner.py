"""The planner against a reader of plans that goes row by row."""

from __future__ import annotations

import numpy as np
from support.fake_steps import TAPS, make_buffers, view_of
from support.plans import VECTORS, plan_of, rows

from midstream.ops import layout
from midstream.runtime.protocol.segments import (
    APPLIED_0,
    CACHED,
    MOST_APPLIED,
    UNSEEN,
    WHOLE,
    cut,
)
from midstream.runtime.worker.request_state import RequestState, acquire_segments
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

EVERYWHERE = ((0, None),)
STEER = plan_of(edits=[(("resid_post", 0), VECTORS[1], 1.0, EVERYWHERE)])


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
