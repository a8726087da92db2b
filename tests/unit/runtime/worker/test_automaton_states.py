"""Bits of tokens that automata select, compared with a scan, however steps are cut and repeated."""

import random
import time

import numpy as np
import pytest
import torch
from support.fake_steps import make_buffers
from support.marks import MARKS, between, item
from support.nightly import rounds

from midstream import Between
from midstream.ops import layout
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.select import select
from midstream.runtime.worker.automaton_states import AutomatonStates
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions
from midstream.runtime.worker.step.step_plan import TokenRuns

DRAFTS, TOKENS = 3, 64


class Request:
    """A request with some marks, and its tokens as far as they are known."""

    def __init__(self, draw: random.Random) -> None:
        self.marks = draw.sample(MARKS, draw.randint(1, 3))
        self.prompt_len = draw.randint(1, 9)
        self.ids = draw.choices(range(3, 9), k=self.prompt_len)
        self.computed = self.drafted = 0
        prompt = Prompt(self.prompt_len, tuple(self.ids))
        wheres = [select(Positions(item(*marks)), prompt, None) for marks in self.marks]
        self.automata = tuple(automaton for where in wheres for automaton in where.automata)

    def bits(self, position: int) -> int:
        chosen = [position in between(self.ids, *marks) for marks in self.marks]
        return sum(is_in << bit for bit, is_in in enumerate(chosen))


def batch_of(runs: list[tuple[int, int, int]], ids: list[int], late: bool, again: int = 0):
    """A step of (slot, position, tokens), which the device alone knows if `late`."""
    slot, position, length = np.array(runs, np.int64).T
    row = np.cumsum(length) - length
    none = np.zeros(len(runs), np.int64)
    slack = np.full(len(runs), DRAFTS if late else 0)
    made = TokenRuns(
        row=row, length=length, position=position + slack, slot=slot, program=none, group=none,
        vectors=none, units=none, kind=none, scored=none, codec=none, record=none, exact=not late,
    )  # fmt: skip
    places = torch.tensor([p + n for _, p, count in runs for n in range(count)])
    unknown = UnknownPositions(lambda: slack, lambda: places) if late else None
    tokens = torch.tensor(ids, dtype=torch.int32)
    return made, StepBatch([], length, position, len(ids), lambda: tokens, unknown)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(rounds(suite=5, nightly=12)))
def test_bits_are_those_of_a_scan_however_the_steps_are_cut(seed: int, late: bool) -> None:
    """Chunks of prompts, drafts of which some are rejected, preemptions, and new requests."""
    draw = random.Random(seed)
    buffers = make_buffers(max_tokens=TOKENS, drafts=DRAFTS)
    states = AutomatonStates(buffers)
    requests: dict[int, Request] = {}
    seen = 0
    for _ in range(60):
        if len(requests) < 4 or draw.random() < 0.05:
            slot = draw.randrange(90)
            if slot in requests:
                states.release(slot)
            requests[slot] = Request(draw)
            states.acquire(slot, requests[slot].automata)
        runs, ids, wanted = [], [], []
        buffers.ids.fill_(-1)
        for slot, request in requests.items():
            if draw.random() < 0.2 or len(ids) > TOKENS - 12:
                continue
            if request.drafted:  # some are rejected: others come in their place
                kept = draw.randint(0, request.drafted)
                request.computed -= request.drafted - kept
                request.drafted = 0
                del request.ids[max(request.computed, request.prompt_len) :]
            if draw.random() < 0.05:
                request.computed = 0
            left = len(request.ids) - request.computed
            if left < 1:
                drafts = draw.randint(0, DRAFTS)
                request.ids += draw.choices(range(3, 9), k=1 + drafts)
                request.drafted, left = drafts, 1 + drafts
            known = request.computed >= request.prompt_len
            count = left if request.drafted else draw.randint(1, min(left, 7))
            if late and not known:
                continue_at = request.computed + count
                request.computed = continue_at  # a prompt, whose positions the host knows
                if continue_at <= request.prompt_len:
                    continue
                request.computed -= count
            for position in range(request.computed, request.computed + count):
                row = len(ids)
                ids.append(request.ids[position])
                if position >= request.prompt_len:
                    wanted.append((row, request.bits(position)))
            runs.append((slot, request.computed, count))
            request.computed += count
        if not runs:
            continue
        states.arm(*batch_of(runs, ids, late=late and all(p > 9 for _, p, _ in runs)))
        found = buffers.ids[:, layout.SELECTED].tolist()
        assert [(row, found[row]) for row, _ in wanted] == wanted
        assert (buffers.ids[:, layout.TOKEN_ID] == -1).all()
        states.check_integrity()
        seen += sum(bits > 0 for _, bits in wanted)
    assert seen > 20
    for slot in requests:
        states.release(slot)
    assert not len(states)
    states.check_integrity()


def with_request(seed: int) -> tuple[AutomatonStates, Request]:
    """States, and a request with 20 generated tokens that has slot 5."""
    draw = random.Random(seed)
    states = AutomatonStates(make_buffers(max_tokens=TOKENS, drafts=DRAFTS))
    request = Request(draw)
    request.ids += draw.choices(range(3, 9), k=20)
    states.acquire(5, request.automata)
    return states, request


def test_a_step_that_repeats_the_rows_of_the_last_sends_positions_alone(monkeypatch) -> None:
    states, request = with_request(3)
    first = request.prompt_len
    runs, batch = batch_of([(5, first, 1)], request.ids[first : first + 1], late=False)
    states.arm(runs, batch)
    monkeypatch.setattr(states, "_lay_out", None)
    for position in range(first + 1, first + 20):
        token = torch.tensor([request.ids[position]], dtype=torch.int32)
        runs = runs._replace(position=runs.position + 1)
        states.arm(runs, batch._replace(token_ids=lambda token=token: token))
        assert states._ids[0, layout.SELECTED] == request.bits(position)


def one_of_many(number: int) -> Automaton:
    marks = [16 * number + 9 + place for place in range(16)]
    start = marks[: 1 + number % 8]
    where = select(Positions(Between(start, marks[8:])), Prompt(1, (1,)), None)
    return where.automata[0]


def test_a_request_with_marks_of_its_own_costs_no_more_beside_many_others() -> None:
    states = AutomatonStates(make_buffers(max_tokens=TOKENS, drafts=DRAFTS))
    made = [[one_of_many(number)] for number in range(600)]
    start = time.process_time()
    for slot in range(600):
        states.release(slot - 300)
        states.acquire(slot, made[slot])
    assert time.process_time() - start < 2
    for slot in range(300, 600):
        first, length = 16 * slot + 9, 1 + slot % 8
        ids = [*range(first, first + length), 1, 1]
        states.arm(*batch_of([(slot, 1, len(ids))], ids, False))
        assert states._ids[: len(ids), layout.SELECTED].tolist() == [0] * length + [1, 1]
    for slot in range(300, 600):
        states.release(slot)
    states.check_integrity()
    assert len(states._tables.moves) < 600


def test_a_request_for_which_there_is_no_memory_leaves_the_others_as_they_are(monkeypatch) -> None:
    states, request = with_request(4)
    monkeypatch.setattr(states._tables, "_write", raises)
    with pytest.raises(MemoryError):
        states.acquire(2, [one_of_many(3), *request.automata])
    states.release(2)
    states.check_integrity()
    for position in range(request.prompt_len, len(request.ids)):
        states.arm(*batch_of([(5, position, 1)], request.ids[position : position + 1], late=False))
        assert states._ids[0, layout.SELECTED] == request.bits(position)


def raises(*_: object) -> None:
    raise MemoryError
