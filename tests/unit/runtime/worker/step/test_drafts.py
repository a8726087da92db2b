"""Drafted tokens: a rejected row leaves no trace, an accepted one is there exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.fake_steps import TAPS, make_buffers, view_of
from support.plans import VECTORS, plan_of, random_plan, rows
from unit.runtime.worker.step.drafting import Drafted, DraftingEngine, check_scores, check_true

from midstream.ops import layout
from midstream.runtime.protocol.segments import WHOLE, cut
from midstream.runtime.worker.request_state import RequestState, acquire_segments
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import UnknownPositions
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

POST = ("resid_post", 1)
PROMPT = 5
EVERYWHERE = ((0, None),)
GENERATED = ((PROMPT, None),)


class Decoding:
    """Random batches of requests that guess ahead, are preempted, served from the cache, end."""

    def __init__(self, seed, late, lag=None):
        self.draw = random.Random(seed)
        self.engine = DraftingEngine(seed, lag=lag, late=late)
        self.running, self.prompts, self.lengths = [], {}, {}
        self.made = self.accepted = self.rejected = self.checked = self.peeks = 0

    def arrive(self):
        length = self.draw.randint(4, 45)
        plan = random_plan(self.draw, length)
        fake = Drafted(f"r{self.made}", plan)
        self.made += 1
        self.lengths[fake.id] = length
        self.prompts[fake.id] = plan.prompt_len if plan else self.draw.randint(1, length)
        self.running.append(fake)
        if self.draw.random() < 0.2:
            fake.computed = self.draw.randint(0, self.prompts[fake.id] - 1)
        self.engine.add(fake)

    def step(self):
        guessing, plain, room = [], [], 64
        for fake in self.draw.sample(self.running, len(self.running)):
            if self.draw.random() < 0.15 or room < 8:  # not in this step
                # Nothing is unknown any more when it is scheduled again.
                fake.ahead = fake.slack = 0
                continue
            if self.draw.random() < 0.03:  # preempted
                fake.computed = fake.ahead = fake.slack = 0
                self.engine.add(fake)
                continue
            left = self.lengths[fake.id] - fake.computed
            prompt_left = self.prompts[fake.id] - fake.computed
            if prompt_left > 0:
                count = min(prompt_left, self.draw.randint(1, 8))
                plain.append((fake, count))
                room -= count
                continue
            count = min(self.draw.choice([0, 1, 2, 3, 5]), left - 1)
            right = self.draw.randint(0, count)
            self.accepted += right
            self.rejected += count - right
            guessing.append((fake, count, right))
            room -= count + 1
        if guessing:
            self.engine.draft(guessing, self.draw, spare=self.draw.choice([0, 0, 4]))
        if plain:
            self.engine.plainly(plain)
        for fake in self.running:
            if fake.plan and fake.computed and self.draw.random() < 0.3:
                start = self.draw.randrange(fake.computed)
                if all(position in fake.true_done for position in range(start, fake.computed)):
                    check_scores(self.engine.peeked(fake, start), fake, start)
                    self.peeks += 1

    def depart(self):
        for fake in list(self.running):
            if fake.computed >= self.lengths[fake.id] or self.draw.random() < 0.01:
                self.running.remove(fake)
                self.engine.session.requests.finish([fake.id])
                taken = self.engine.take(fake.id)
                assert len(taken) == (fake.plan is not None)
                for request in taken:
                    check_true(request, fake)
                    self.checked += 1

    def run(self, steps):
        for _ in range(steps):
            while len(self.running) < 5 and self.draw.random() < 0.6:
                self.arrive()
            self.step()
            self.depart()


@pytest.mark.parametrize(
    ("seed", "lag", "late"),
    [
        (0, None, False),
        (2, 1, True),
        pytest.param(1, 0, True, marks=pytest.mark.nightly),
        pytest.param(3, 4, False, marks=pytest.mark.nightly),
        pytest.param(0, None, True, marks=pytest.mark.nightly),
        pytest.param(1, 0, False, marks=pytest.mark.nightly),
        pytest.param(2, 1, False, marks=pytest.mark.nightly),
        pytest.param(3, 4, True, marks=pytest.mark.nightly),
    ],
)
def test_of_random_drafts_only_what_was_accepted_remains(seed, lag, late):
    run = Decoding(seed, late, lag)
    run.run(60)
    assert run.accepted > 30
    assert run.rejected > 30
    assert run.checked > 5
    assert run.peeks > 10


def planner_with(plan):
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    slots = SlotTable(max_model_len=100)
    codecs = CodecTable(buffers)
    segments = acquire_segments(cut(plan, TAPS, WHOLE), tables, CapturedRowIndex(), codecs)
    slots.add(RequestState("a", "u", plan, slots.new_slot(), segments))
    return StepPlanner(slots, tables), slots


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
    planner, _ = planner_with(plan_of(edits=[(POST, VECTORS[1], 1.0, ((10, 20),))]))
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
    planner, _ = planner_with(plan_of(edits=[(POST, rows(40, 10), ((10, 50),))]))
    view, _ = late_view(23, 3, 2, 21)
    plan = planner.plan(view)
    assert plan.device_positions
    assert (plan.tokens[:, layout.POSITION] < 0).all()
    exact = planner.plan(view_of(["a"], [3], [23]))
    assert not exact.device_positions
    assert exact.tokens[:, layout.POSITION].tolist() == [23, 24, 25]


def test_a_decode_step_after_drafts_is_not_taken_for_one_like_the_last():
    planner, _ = planner_with(plan_of(edits=[(POST, VECTORS[1], 1.0, ((10, 20),))]))
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
    plan = plan_of(edits=[(POST, VECTORS[1], 1.0, ((12, None),))])
    planner, slots = planner_with(plan)
    planner.plan(view_of(["a"], [10], [0]))
    # The bound at 12 makes the host wait: it then knows less of the request than it had counted.
    for host, slack, true in [(10, 0, 10), (14, 3, 11), (18, 6, 12), (16, 3, 13)]:
        view = view_of(["a"], [4], [host])
        if slack:
            view, _ = late_view(host, 4, slack, true)
        planner.plan(view)
    request = slots.get("a")
    slots.remove([request])
    assert not request.done.any()
