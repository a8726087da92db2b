"""Scores of requests that go on: those asked for, once each, while nothing is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.stored import worker_info

from midstream.errors import MessageError
from midstream.runtime.protocol.scores import RequestScores, score_blocks
from midstream.runtime.worker.row_index import CapturedRowIndex

WORKER = worker_info()


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
