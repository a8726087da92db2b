"""What a step's plan says of each row: from the cache, without work, drafted, or new."""

import numpy as np
import torch
from support.fake_steps import TAPS, make_buffers, view_of
from support.plans import VECTORS, plan_of, rows

from midstream.ops import layout
from midstream.runtime.protocol.segments import APPLIED_0, CACHED, MOST_APPLIED, UNSEEN, WHOLE, cut
from midstream.runtime.worker.request_state import RequestState, acquire_segments
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import UnknownPositions
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

TAP = ("resid_post", 0)
STEER = plan_of(edits=[(TAP, VECTORS[1], 1.0, ((0, None),))])
ONCE = APPLIED_0 + 1


def planner_of(*plans):
    """A planner, and its slots, with requests a, b, … of these plans."""
    slots = SlotTable(max_model_len=100)
    planner = StepPlanner(slots, ProgramTable(make_buffers()))
    for name, plan in zip("abc", plans, strict=False):
        add(planner, slots, name, plan)
    return planner, slots


def add(planner, slots, name, plan):
    codecs = CodecTable(make_buffers())
    segments = acquire_segments(cut(plan, TAPS, WHOLE), planner._tables, CapturedRowIndex(), codecs)
    slots.add(RequestState(name, "u", plan, slots.new_slot(), segments))


def active_rows(step):
    """The rows of a step that have a program."""
    return np.arange(len(step.tokens))[step.active].tolist()


def states_of(slots, *names):
    """The states of positions of requests, which are removed."""
    requests = [slots.get(name) for name in names]
    slots.remove(requests)
    return [request.done.tolist() for request in requests]


def test_a_cache_hit_after_preemption_marks_only_what_was_never_computed():
    plan = plan_of(edits=[(TAP, VECTORS[1], 1.0, ((4, 40),))])
    planner, slots = planner_of(plan, plan)
    # Rows that ask for nothing are computed all the same.
    for computed, scheduled in [(0, 6), (16, 4), (10, 12)]:
        step = planner.plan(view_of(["b", "a"], [1, scheduled], [computed] * 2))
        count = len(step.slots)
        slots.record(step, np.ones(count, np.int64), np.zeros(count, bool))
    # The second run began at 16; the third, at 10, computed what the cache had served as well.
    assert states_of(slots, "a", "b") == [
        [UNSEEN] * 4 + [ONCE] * 2 + [CACHED] * 4 + [ONCE] * 12,
        [UNSEEN] + [CACHED] * 9 + [ONCE] + [CACHED] * 5 + [ONCE],
    ]


def test_rows_without_work_in_decode_steps_like_the_last_were_computed_and_not_cached():
    planner, slots = planner_of(STEER, plan_of(edits=[(TAP, rows(1, 4), ((12, 16),))]))
    for position in (5, 6, 7, 9, 11):
        step = planner.plan(view_of(["a", "b"], [1, 1], [position, position]))
        slots.record(step, np.ones(1, np.int64), np.zeros(1, bool))
    assert states_of(slots, "a", "b") == [
        [CACHED] * 5 + [ONCE] * 3 + [CACHED, ONCE] * 2,
        [CACHED] * 5 + [UNSEEN] * 3 + [CACHED, UNSEEN] * 2,
    ]


def test_edits_by_position_are_laid_out_once_for_decode_steps_and_get_their_positions():
    by_position = plan_of(edits=[(TAP, rows(12, 4), ((4, 16),))])
    planner, _ = planner_of(by_position, by_position, STEER)
    laid_out, before = [], None
    for a, b in [(4, 7), (5, 8), (6, 9), (9, 10), (10, 11)]:
        step = planner.plan(view_of(["a", "plain", "c", "b"], [1, 1, 1, 1], [a, 3, 2 * a, b]))
        if a == 4:  # both enter the segment of their edit
            continue
        assert step.tokens[:, layout.POSITION].tolist() == [a, 0, 0, b]
        assert (step.tokens[:, layout.PROGRAM] != 0).tolist() == [True, False, True, True]
        assert step.positions.tolist() == [a, 2 * a, b]
        assert before is None or step.tokens is not before.tokens
        laid_out.append(step.runs.row)
        before = step
    assert all(row is laid_out[0] for row in laid_out)


def test_decode_steps_without_work_are_planned_once_until_one_has_some():
    """As those of requests that captured their prompt's last token."""
    planner, slots = planner_of(*[plan_of(edits=[(TAP, VECTORS[1], 1.0, ((9, 12),))])] * 2)
    make_runs, made, found = planner._make_runs, [], []
    planner._make_runs = lambda *args: made.append(at) or make_runs(*args)
    for at in range(4, 17):
        step = planner.plan(view_of(["a", "b"], [1, 1], [at, at - 2]))
        found.append([] if step is None else active_rows(step))
    assert found == [[]] * 5 + [[0], [0], [0, 1], [1], [1]] + [[]] * 3
    assert made == [4, 9, 11, 12, 14], "the first step, and where one begins or ends to be edited"
    assert [len(states) for states in states_of(slots, "a", "b")] == [17, 15]


def test_a_count_too_large_to_be_told_stays_the_largest():
    planner, slots = planner_of(STEER)
    step = planner.plan(view_of(["a"], [2], [0]))
    slots.record(step, np.array([2**20, 3]), np.zeros(2, bool))
    assert states_of(slots, "a") == [[MOST_APPLIED, APPLIED_0 + 3]]


def test_a_request_that_comes_under_an_id_of_an_unchanged_batch_is_seen():
    # The ids of a batch are looked up once for as long as they stay the same.
    planner, slots = planner_of(STEER)
    view = view_of(["b", "a"], [1, 1], [0, 0])
    assert active_rows(planner.plan(view)) == [1]
    add(planner, slots, "b", STEER)
    assert sorted(active_rows(planner.plan(view))) == [0, 1]
    states_of(slots, "a", "b")
    assert planner.plan(view) is None


class Device:
    """Positions that only the device knows; counts how often they were asked for."""

    def __init__(self, *positions):
        self.tensor, self.asked = torch.tensor(positions), 0

    def late(self, slack):
        def positions():
            self.asked += 1
            return self.tensor

        return UnknownPositions(lambda: np.array([slack]), positions)


def late_view(host, count, slack, true):
    device = Device(*range(true, true + count))
    return view_of(["a"], [count], [host])._replace(unknown=device.late(slack)), device


def test_the_device_is_waited_for_only_where_a_row_may_be_in_either_of_two_segments():
    planner, _ = planner_of(plan_of(edits=[(TAP, VECTORS[1], 1.0, ((10, 20),))]))
    for host, slack, waits in [
        (8, 2, True),  # [6, 11): before the bound or after it
        (13, 3, False),  # [10, 16): after it, however few were accepted
        (14, 3, False),
        (17, 3, False),  # [14, 20)
        (18, 2, True),  # [16, 21)
        (22, 3, True),  # [19, 25)
        (23, 3, False),  # [20, 26): another segment, but surely so
    ]:
        view, device = late_view(host, 3, slack, host - slack)
        plan = planner.plan(view)
        assert device.asked == waits, host
        if waits:
            active = range(max(10, host - slack), min(20, host - slack + 3))
            assert (0 if plan is None else plan.slots.size) == len(active)
            assert plan is None or plan.positions.tolist() == list(active)
            assert plan is None or plan.runs.exact
        elif plan is not None:
            assert not plan.runs.exact
            assert plan.positions.tolist() == list(range(host, host + 3))


def test_a_position_that_the_program_reads_is_left_to_the_device():
    planner, _ = planner_of(plan_of(edits=[(TAP, rows(40, 10), ((10, 50),))]))
    view, _ = late_view(23, 3, 2, 21)
    plan = planner.plan(view)
    assert plan.device_positions
    assert (plan.tokens[:, layout.POSITION] < 0).all()
    exact = planner.plan(view_of(["a"], [3], [23]))
    assert not exact.device_positions
    assert exact.tokens[:, layout.POSITION].tolist() == [23, 24, 25]


def test_a_decode_step_after_drafts_is_not_taken_for_one_like_the_last():
    planner, _ = planner_of(plan_of(edits=[(TAP, VECTORS[1], 1.0, ((10, 20),))]))
    for position in (17, 18, 19):
        assert planner.plan(view_of(["a"], [1], [position])) is not None
    # Up to two of the last step's drafts were rejected: at 20 nothing is asked for, at 19 is.
    view, device = late_view(20, 1, 2, 19)
    plan = planner.plan(view)
    assert device.asked
    assert plan.positions.tolist() == [19]
    view, _ = late_view(19, 1, 2, 17)
    assert not planner.plan(view).runs.exact


def test_drafts_that_were_rejected_are_not_taken_for_positions_from_the_cache():
    plan = plan_of(edits=[(TAP, VECTORS[1], 1.0, ((12, None),))])
    planner, slots = planner_of(plan)
    planner.plan(view_of(["a"], [10], [0]))
    # The bound at 12 makes the host wait: it then knows less of the request than it had counted.
    for host, slack, true in [(10, 0, 10), (14, 3, 11), (18, 6, 12), (16, 3, 13)]:
        view = view_of(["a"], [4], [host])
        if slack:
            view, _ = late_view(host, 4, slack, true)
        planner.plan(view)
    (states,) = states_of(slots, "a")
    assert not any(states)
