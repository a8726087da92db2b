"""Parts of scores: the first rank has the sums, and what the front end adds up stays the same."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from midstream.runtime.protocol.rank_parts import probe_numbers
from midstream.runtime.protocol.runs import Floats
from midstream.runtime.worker.split_scores import SplitScores

TAP = ("k", 3)


class Slots:
    """Requests in slots; the fourth reports nothing."""

    reports = np.array([True, True, True, False])
    split = ((), None, ((2, 2),), ((2, 2),))

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def by_slot(self, slot: int) -> Any:
        split = self.split[slot]
        return SimpleNamespace(split=((0, self.parts), (2, self.parts)) if split is None else split)


def runs(*rows: tuple[int, int, int, bool]) -> Any:
    slot, row, length, scored = (np.array(column) for column in zip(*rows, strict=True))
    found = SimpleNamespace(slot=slot, row=row, length=length, scored=scored.astype(np.int64))
    return SimpleNamespace(plan=SimpleNamespace(runs=found))


# Slot, first row, number of rows, and whether they have scores.
STEP = runs((1, 0, 3, True), (0, 3, 1, True), (3, 4, 2, True), (2, 6, 2, True), (1, 8, 1, False))
SUMMED = {(row, column) for row in range(3) for column in (0, 2)} | {(6, 2), (7, 2)}


def join(ranks: int, parts: int, before: list[Tensor]) -> list[Tensor]:
    """The buffers of all ranks after they added up."""
    sent: list[Tensor] = []
    for rank in range(ranks):
        SplitScores(rank, ranks, lambda mine: sent.append(mine) or mine).join(
            STEP, Slots(parts), before[rank].clone()
        )
    total = torch.stack(sent).sum(0)
    after = [buffer.clone() for buffer in before]
    for rank in range(ranks):
        SplitScores(rank, ranks, lambda _: total).join(STEP, Slots(parts), after[rank])
    return after


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (4, 4), (4, 2)])
def test_the_first_rank_has_the_sums_and_the_front_end_adds_up_the_same(ranks, parts):
    draw = torch.Generator().manual_seed(ranks + parts)
    before = [torch.randint(-99, 99, (10, 3), generator=draw).float() for _ in range(ranks)]
    copies = ranks // parts
    after = join(ranks, parts, before)
    for row in range(10):
        for column in range(3):
            values = [float(buffer[row, column]) for buffer in before]
            if (row, column) not in SUMMED:
                assert [float(buffer[row, column]) for buffer in after] == values
                continue
            step = copies if row < 3 else ranks // 2
            total = sum(values[::step])
            assert [float(buffer[row, column]) for buffer in after] == [total] + [0] * (ranks - 1)
    probe: Any = SimpleNamespace(tap=TAP, slots=range(2, 3))
    where = np.arange(3)

    def shown(buffers: list[Tensor]) -> Floats:
        sent = [
            (
                SimpleNamespace(taps=[TAP], parts=[parts], tensor_rank=rank, tensor_ranks=ranks),
                where,
                buffers[rank][:3].numpy(),
            )
            for rank in range(ranks)
        ]
        ((_, total),) = probe_numbers(probe, sent)  # type: ignore[arg-type]
        return total

    assert np.array_equal(shown(before), shown(after))


def test_a_step_without_such_scores_asks_no_other_rank():
    def never(_: Tensor) -> Tensor:
        raise AssertionError

    scores = torch.ones(10, 3)
    for step in (runs((0, 0, 3, True), (3, 4, 2, True)), runs((1, 0, 3, False))):
        SplitScores(1, 2, never).join(step, Slots(2), scores)
    assert torch.equal(scores, torch.ones(10, 3))
