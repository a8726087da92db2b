"""Steps that repeat with other requests, against a planner that keeps no step."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.fake_steps import TAPS, make_buffers, view_of
from support.plans import VECTORS, plan_of, random_plan

from midstream.runtime.protocol.segments import WHOLE, cut
from midstream.runtime.worker.request_state import (
    PlacedVersion,
    RankPlan,
    RequestState,
    acquire_segments,
)
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.step.kept_steps import MOST_KEPT
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

NUM_PLANS = 3
STEER = plan_of(edits=[(("resid_post", 0), VECTORS[1], 1.0, ((0, None),))])


class Streamed:
    """Requests of a few plans, planned twice: `kept` and `fresh` have the same in other slots."""

    def __init__(self, seed):
        buffers = make_buffers()
        self.tables = ProgramTable(buffers)
        index, codecs = CapturedRowIndex(), CodecTable(buffers)
        self.plans = []
        for nth in range(NUM_PLANS):
            plan = random_plan(random.Random(seed + nth), 30, tuple(TAPS)) if nth else None
            plan = plan or STEER
            segments = acquire_segments(cut(plan, TAPS, WHOLE), self.tables, index, codecs)
            self.plans.append(RankPlan(nth + 1, b"", plan, segments))
        self.slots = [SlotTable(100), SlotTable(100)]
        self.planner = StepPlanner(self.slots[0], self.tables)
        self.added = 0

    def add(self, which):
        """Add a request with a plan to both; return its id."""
        self.added += 1
        shared = self.plans[which]
        for slots in self.slots:
            slots.add(
                RequestState(
                    f"r{self.added}", "u", shared.resolved, slots.new_slot(), shared.segments,
                    shared=shared, serial=self.added,
                )
            )  # fmt: skip
        return f"r{self.added}"

    def step(self, names, counts, computed):
        """Plan a step in both, and return both plans."""
        view = view_of(names, counts, computed)
        return self.planner.plan(view), StepPlanner(self.slots[1], self.tables).plan(view)

    def remove(self, names):
        """Remove requests from both, and return the states of their positions."""
        found = []
        for slots in self.slots:
            requests = [slots.get(name) for name in names]
            for request in requests:
                slots.remove([request])
            found.append([request.done.tolist() for request in requests])
        return found


def record(slots, plan):
    """Record that the device did what a step's plan says."""
    if plan is not None:
        slots.record(plan, plan.most.astype(np.int64), np.zeros(plan.slots.size, bool))


def assert_same(kept, fresh, slots):
    """Two plans of a step say the same, each of its own slots."""
    assert (kept is None) == (fresh is None)
    if kept is None:
        return
    for name in ("tokens", "positions", "fewest", "most", "captures"):
        assert np.array_equal(getattr(kept, name), getattr(fresh, name)), name
    for name in ("num_units", "by_id", "scored", "device_positions"):
        assert getattr(kept, name) == getattr(fresh, name), name
    for name in ("row", "length", "position", "program", "group", "units", "kind", "record"):
        assert np.array_equal(getattr(kept.runs, name), getattr(fresh.runs, name)), name
    mine, others = (
        table.serials(plan.runs.slot) for table, plan in zip(slots, (kept, fresh), strict=True)
    )
    assert mine.tolist() == others.tolist()
    assert np.array_equal(kept.slots, np.repeat(kept.runs.slot, kept.runs.length))
    for one, other in zip(kept.batches, fresh.batches, strict=True):
        assert one.serial.tolist() == other.serial.tolist()
        assert np.array_equal(one.record, other.record)


# The requests of a step: the plan of each, its number of tokens, and its first position.
members = st.tuples(
    st.integers(0, NUM_PLANS - 1), st.sampled_from([1, 4, 9]), st.sampled_from([0, 5])
)


@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.lists(members, min_size=1, max_size=3), min_size=1, max_size=2),
    order=st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 1)), min_size=2),
)
def test_a_step_of_other_requests_is_planned_as_if_none_like_it_had_been(seed, kinds, order):
    stream = Streamed(seed)
    for which, swapped, other in order:
        step = kinds[which % len(kinds)]
        names = [stream.add((plan + other) % NUM_PLANS) for plan, _, _ in step]
        if swapped:
            names, step = names[::-1], step[::-1]
        counts, computed = [count for _, count, _ in step], [first for _, _, first in step]
        kept, fresh = stream.step(names, counts, computed)
        assert_same(kept, fresh, stream.slots)
        for slots, plan in zip(stream.slots, (kept, fresh), strict=True):
            record(slots, plan)
        # One row more of each, which may be in another segment.
        after = [first + count for count, first in zip(counts, computed, strict=True)]
        assert_same(*stream.step(names, [1] * len(names), after), stream.slots)
        mine, others = stream.remove(names)
        assert mine == others


def test_a_request_with_another_version_of_its_plan_has_its_own_step():
    stream = Streamed(7)
    names = [stream.add(0), stream.add(0)]
    first, _ = stream.step(names, [9, 9], [0, 0])
    again, _ = stream.step([stream.add(0), stream.add(0)], [9, 9], [0, 0])
    assert again.tokens is first.tokens
    changed = [stream.add(0), stream.add(0)]
    for slots in stream.slots:
        request = slots.get(changed[1])
        other = stream.plans[1]
        there = request.change(PlacedVersion(1, 3, other), other.segments)
        slots.change([(request.slot, there)])
    kept, fresh = stream.step(changed, [9, 9], [0, 0])
    assert_same(kept, fresh, stream.slots)
    assert not np.array_equal(kept.tokens, first.tokens)


def test_a_few_steps_are_kept():
    stream = Streamed(7)
    found = []
    for count in (*range(2, 3 + MOST_KEPT), 2):
        plan, _ = stream.step([stream.add(0)], [count], [0])
        found.append(plan)
    assert not np.array_equal(found[0].tokens, found[1].tokens)
    assert found[0].tokens is not found[-1].tokens, "the first step was still kept"
    assert np.array_equal(found[0].tokens, found[-1].tokens)
