"""Scores of requests that go on: those asked for, once each, while nothing is forgotten."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.fake_steps import Fake, FakeEngine
from support.nightly import rounds
from support.plans import VECTORS, plan_of
from support.stored import worker_info

from midstream.errors import MessageError
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.rpc import ReadScores, read_answers, read_request
from midstream.runtime.protocol.scores import RequestScores, ScoreBlock, score_blocks
from midstream.runtime.worker.endpoint import pack_scores
from midstream.runtime.worker.row_index import CapturedRowIndex

PRE, POST = ("resid_pre", 1), ("resid_post", 1)
EVERYWHERE = ((0, None),)
SOME = plan_of(probes=[("a", PRE, ((2, 5), (7, 9))), ("b", POST, ((3, None),))])
ALL = plan_of(probes=[("p", POST, EVERYWHERE)])
SILENT = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)])
WORKER = worker_info()


def peek(engine: FakeEngine, spans: dict[str, tuple[int, int]]) -> dict[str, ScoreBlock]:
    """There and back, as over the wire."""
    request = read_request(pack(ReadScores(spans)))
    answer = pack(pack_scores(engine.session.collection.read_scores(request.spans).values()))
    [found] = read_answers(request, [answer])
    return dict(score_blocks(WORKER, found.requests, found.data))


def check(fake: Fake, span: tuple[int, int], seen: dict[str, ScoreBlock]) -> None:
    expected = sorted(position for position in fake.scored if span[0] <= position < span[1])
    if not expected:
        assert fake.id not in seen
        return
    found = seen[fake.id]
    assert found.worker is WORKER
    assert found.positions.tolist() == expected
    for (slot, position), score in fake.scores.items():
        if position in expected:
            assert found.values[expected.index(position), slot] == score


@pytest.mark.parametrize("lag", [None, 2])
@pytest.mark.parametrize("seed", range(rounds(suite=2, nightly=10)))
def test_each_request_is_told_the_scores_of_the_span_it_asks_for(seed, lag):
    draw = random.Random(seed)
    engine = FakeEngine(seed, lag=lag)
    fakes = [Fake(f"r{nth}", plan) for nth, plan in enumerate([SOME, ALL, SILENT, None, ALL, SOME])]
    for fake in fakes:
        engine.add(fake)
    for _ in range(25):
        batch = [(fake, draw.randint(1, 3)) for fake in fakes if draw.random() < 0.8]
        engine.step(batch)
        if draw.random() < 0.2:
            preempted = draw.choice(fakes)
            again = preempted.computed
            preempted.computed = 0
            engine.step([(preempted, again)])
        spans = {}
        for fake in draw.sample(fakes, 4):
            start = draw.randint(0, fake.computed)
            spans[fake.id] = (start, draw.randint(start, fake.computed))
        seen = peek(engine, spans)
        for fake in fakes:
            if fake.id in spans:
                check(fake, spans[fake.id], seen)
            else:
                assert fake.id not in seen
    for fake in fakes:
        engine.session.requests.finish([fake.id])
        check(fake, (0, fake.computed), peek(engine, {fake.id: (0, fake.computed)}))
        taken = engine.take(fake.id)
        if fake.scored:
            assert taken[0].scores[0].positions.tolist() == sorted(fake.scored)
        assert peek(engine, {fake.id: (0, fake.computed)}) == {}
    engine.session.check_integrity()


@dataclass
class Shipped:
    """A step's scores, and whether somebody has looked at them."""

    values: torch.Tensor
    looked: int = 0

    def rows(self) -> torch.Tensor:
        self.looked += 1
        return self.values

    def free(self) -> None:
        pass


def note(ledger: CapturedRowIndex, position: int, value: float, serial: int = 7) -> Shipped:
    shipped = Shipped(torch.tensor([[value, -value]]))
    one = {"serial": serial, "position": position, "length": 1, "first": 0}
    arrays = {name: np.array([number], np.int64) for name, number in one.items()}
    ledger.record(shipped, **arrays, kind=np.array([ledger.kind((0,))], np.int64))
    return shipped


def test_a_look_waits_for_the_steps_that_it_needs_and_no_other():
    ledger = CapturedRowIndex()
    steps = [note(ledger, position, float(position)) for position in range(6)]
    found = ledger.read((0,), {7: (3, 5)}, 2)[7]
    assert found.positions.tolist() == [3, 4]
    assert found.values[:, 0, 0].tolist() == [3.0, 4.0]
    assert [bool(step.looked) for step in steps] == [False, False, False, True, True, False]
    assert ledger.read((0,), {7: (3, 5)}, 0) == {}
    assert ledger.read((0, 1), {7: (3, 5)}, 2) == {}
    assert len(ledger) == 6


@pytest.mark.parametrize("data", [b"", b"abc", bytes(15), bytes(17)])
def test_scores_that_are_cut_off_or_too_long_are_refused(data):
    requests = [RequestScores("u", 2, [(3, 1), (7, 1)])]
    assert [uid for uid, _ in score_blocks(WORKER, requests, bytes(16))] == ["u"]
    with pytest.raises(MessageError, match=f"worker 0.0.0 sent {len(data)} bytes .* described 16"):
        list(score_blocks(WORKER, requests, data))
