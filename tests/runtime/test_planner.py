"""The planner against a reader of plans that goes row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.runtime.buffers import Buffers
from midstream.runtime.ledger import Ledger
from midstream.runtime.planner import Planner
from midstream.runtime.programs import Edit, Tables
from midstream.runtime.requests import (
    UNSEEN,
    Request,
    acquire_segments,
    cut,
    release_segments,
)
from midstream.runtime.stepview import StepView
from midstream.spec import ResolvedCapture, ResolvedEdit, ResolvedPlan, Vector

TAPS = {("resid_post", 0): 0, ("resid_post", 1): 1, ("resid_pre", 2): 2}
VECTORS = [Vector.parse([float(n), 1.0, 0.0, 2.0]) for n in range(3)]


def make_buffers(**changes) -> Buffers:
    sizes = {
        "taps": list(TAPS),
        "max_tokens": 64,
        "hidden_size": 4,
        "table_rows": 64,
        "max_edits": 128,
        "bank_rows": 16,
        "ring_rows": 512,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return Buffers.allocate(**{**sizes, **changes})


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(1, 12))), min_size=1, max_size=3
).map(lambda found: _disjoint(found))
plans = st.builds(
    ResolvedPlan,
    prompt_len=st.integers(1, 20),
    edits=st.lists(
        st.builds(
            lambda tap, vector, scale, where: ResolvedEdit(*tap, vector, scale, where),
            st.sampled_from([*TAPS, ("resid_mid", 7)]),
            st.sampled_from(VECTORS),
            st.sampled_from([0.5, 2.0]),
            ranges,
        ),
        max_size=3,
    ).map(tuple),
    captures=st.lists(
        st.builds(
            ResolvedCapture,
            st.sets(st.sampled_from(list(TAPS)), min_size=1).map(lambda s: tuple(sorted(s))),
            ranges,
        ),
        max_size=2,
    ).map(tuple),
)


def _disjoint(found):
    """Sorted, merged, half-open ranges, from (start, length or None)."""
    out: list[tuple[int, int | None]] = []
    for start, length in sorted(found, key=lambda f: f[0]):
        stop = None if length is None else start + length
        if out and (out[-1][1] is None or out[-1][1] >= start):
            last = out[-1][1]
            out[-1] = (out[-1][0], None if last is None or stop is None else max(last, stop))
        else:
            out.append((start, stop))
    return tuple(out)


def covers(where, position):
    return any(start <= position and (stop is None or position < stop) for start, stop in where)


def read_program(buffers, program):
    """{tap: [(vector, scale), …]} of a program, as the op would read it."""
    found = {}
    for tap, index in TAPS.items():
        start, count = buffers.table[index, program, :2].tolist()
        edits = [
            (tuple(buffers.bank[buffers.edit_rows[e]].tolist()), float(buffers.edit_scales[e]))
            for e in range(start, start + count)
        ]
        if edits:
            found[tap] = edits
    return found


def wanted_edits(plan, position):
    found = {}
    for edit in plan.edits:
        if (edit.site, edit.layer) in TAPS and covers(edit.ranges, position):
            values = (tuple(edit.vector.numpy().tolist()), edit.scale)
            found.setdefault((edit.site, edit.layer), []).append(values)
    return found


def wanted_taps(plan, position):
    return {tap for c in plan.captures if covers(c.worker_ranges, position) for tap in c.taps}


@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(st.one_of(st.none(), plans), min_size=1, max_size=5),
    chunks=st.lists(st.lists(st.integers(0, 7), min_size=5, max_size=5), min_size=1, max_size=6),
)
def test_every_row_of_every_step_gets_what_its_request_asks_for_at_its_position(plans, chunks):
    buffers = make_buffers()
    tables = Tables(buffers)
    planner = Planner(tables, max_model_len=200)
    requests = {}
    for nth, plan in enumerate(plans):
        if plan is not None:
            segments = acquire_segments(cut(plan, TAPS, True), tables, Ledger())
            request = Request(f"r{nth}", "u", plan, planner.new_slot(), segments)
            requests[f"r{nth}"] = request
            planner.add(request)
    computed = [0] * len(plans)
    for chunk in chunks:
        batch = [nth for nth in range(len(plans)) if chunk[nth] > 0]
        if not batch:
            continue
        scheduled = [chunk[nth] for nth in batch]
        view = StepView(
            [f"r{nth}" for nth in batch],
            np.array(scheduled, np.int32),
            np.array([computed[nth] for nth in batch], np.int32),
            sum(scheduled),
        )
        step = planner.plan(view, watch=False)
        check_step(step, view, plans, buffers)
        for nth in batch:
            computed[nth] += chunk[nth]
    for request in requests.values():
        release_segments(request.segments, tables)
        planner.forget(request)
    tables.check_integrity()
    assert len(planner) == 0


def check_step(step, view, plans, buffers):
    tokens = np.zeros((view.num_tokens, 4), np.int32) if step is None else step.tokens
    taken: set[int] = set()
    row = 0
    for name, count, first in zip(view.request_ids, view.scheduled, view.computed, strict=True):
        plan = plans[int(name[1:])]
        for position in range(first, first + count):
            program, group, record, _ = tokens[row].tolist()
            edits = {} if plan is None else wanted_edits(plan, position)
            taps = set() if plan is None else wanted_taps(plan, position)
            assert (program != 0) == bool(edits or taps)
            if program:
                assert read_program(buffers, program) == edits
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
            row += 1
    if step is not None:
        assert taken == set(range(step.num_records))


def test_positions_that_no_step_computed_stay_unseen():
    """A prompt served from the cache, say: whoever asked for edits there is told of it."""
    buffers = make_buffers()
    tables = Tables(buffers)
    planner = Planner(tables, max_model_len=100)
    plan = ResolvedPlan(20, (ResolvedEdit("resid_post", 0, VECTORS[1], 1.0, ((0, None),)),), ())
    segments = acquire_segments(cut(plan, TAPS, True), tables, Ledger())
    request = Request("a", "u", plan, planner.new_slot(), segments)
    planner.add(request)
    view = StepView(["a"], np.array([4], np.int32), np.array([16], np.int32), 4)
    step = planner.plan(view, watch=False)
    planner.record(step, np.full(4, 1))
    planner.forget(request)
    assert request.done.tolist() == [UNSEEN] * 16 + [2] * 4


def test_a_slot_that_is_used_again_remembers_nothing():
    buffers = make_buffers()
    tables = Tables(buffers)
    planner = Planner(tables, max_model_len=100)
    plan = ResolvedPlan(8, (ResolvedEdit("resid_post", 0, VECTORS[1], 1.0, ((0, None),)),), ())
    slots = []
    for name in ("a", "b"):
        segments = acquire_segments(cut(plan, TAPS, True), tables, Ledger())
        request = Request(name, "u", plan, planner.new_slot(), segments)
        slots.append(request.slot)
        planner.add(request)
        if name == "b":
            planner.forget(request)
            assert request.done.tolist() == [UNSEEN] * 0
            break
        step = planner.plan(StepView([name], np.array([8]), np.array([0]), 8), watch=False)
        planner.record(step, np.full(8, 1))
        planner.forget(request)
    assert slots[0] == slots[1]


def test_without_requests_only_the_watched_row_is_active():
    buffers = make_buffers()
    planner = Planner(Tables(buffers), max_model_len=100)
    view = StepView(["x"], np.array([5], np.int32), np.array([0], np.int32), 5)
    assert planner.plan(view, watch=False) is None
    step = planner.plan(view, watch=True)
    assert step.tokens[:, layout.PROGRAM].tolist() == [layout.WATCH_PROGRAM, 0, 0, 0, 0]
    assert step.num_records == 0
    assert step.slots.tolist() == [-1]


def test_equal_plans_share_one_program_and_one_vector():
    tables = Tables(make_buffers())
    edits = (Edit(0, VECTORS[0], 1.0), Edit(2, VECTORS[1], 2.0))
    first = tables.acquire_program(edits)
    assert tables.acquire_program(tuple(Edit(e.tap, e.vector, e.scale) for e in edits)) == first
    assert tables.acquire_program(edits[:1]) != first
    assert tables._bank.used == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bank_rows": 2}, "bank_rows"),
        ({"max_edits": 2}, "max_edits"),
        ({"table_rows": 2}, "programs"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_setting_and_leaves_nothing_behind(sizes, message):
    tables = Tables(make_buffers(**sizes))
    edits = tuple(Edit(n, VECTORS[n], 1.0) for n in range(3))
    with pytest.raises(SpecError, match=message):
        tables.acquire_program(edits)
    tables.check_integrity()
