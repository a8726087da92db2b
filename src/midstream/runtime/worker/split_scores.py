"""Scores of which tensor-parallel ranks have parts, added up before they leave with a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.protocol.runs import Ints
from midstream.runtime.worker.rank_agreement import SumOverRanks
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable


class SplitScores:
    """The parts of scores of one rank."""

    def __init__(self, rank: int, ranks: int, add_up: SumOverRanks) -> None:
        self._rank = rank
        self._ranks = ranks
        self._add_up = add_up

    def join(self, prepared: PreparedStep, slots: SlotTable, scores: Tensor) -> None:
        """Add up parts of reported scores, [tokens, slots]: the first rank's are sums, others 0."""
        cells, is_mine = self._cells(prepared, slots, scores.shape[1])
        if not cells.size:
            return
        places = torch.from_numpy(cells).to(scores.device)
        flat = scores.view(-1)
        parts = flat[places]
        if not is_mine.all():  # ranks beside it have the same part
            parts = torch.where(torch.from_numpy(is_mine).to(scores.device), parts, 0.0)
        total = self._add_up(parts)
        flat[places] = total if self._rank == 0 else 0.0

    def _cells(
        self, prepared: PreparedStep, slots: SlotTable, width: int
    ) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Return split scores' places in the flat buffer, and which this rank counts for."""
        runs = prepared.plan.runs
        chosen = np.flatnonzero((runs.scored > 0) & slots.reports[runs.slot])
        cells = [np.zeros(0, np.int64)]
        is_mine = [np.zeros(0, np.bool_)]
        for slot, row, length in np.array((runs.slot, runs.row, runs.length))[:, chosen].T.tolist():
            request = slots.by_slot(slot)
            for column, parts in () if request is None else request.split:
                cells.append(np.arange(row, row + length) * width + column)
                is_own = self._rank % (self._ranks // parts) == 0
                is_mine.append(np.full(length, is_own))
        return np.concatenate(cells), np.concatenate(is_mine)
