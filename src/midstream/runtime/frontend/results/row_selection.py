"""Rows of result blocks that a plan captures, while its request runs and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from midstream.plan import ModelShape, ResolvedPlan
from midstream.results.activations import Activations
from midstream.runtime.frontend.request.budget import row_sizes
from midstream.runtime.frontend.results.assembly import activations_of, no_rows, select_final
from midstream.runtime.frontend.results.partial_scores import ScoreSelection
from midstream.runtime.protocol.results import ResultBlock
from midstream.runtime.protocol.runs import Ints


class RowSelection:
    """Selects rows of one plan. Has no state."""

    def __init__(self, plan: ResolvedPlan, shape: ModelShape) -> None:
        self._plan = plan
        self._no_rows = no_rows(plan, shape)
        self.row_bytes = row_sizes(plan, shape)
        self.position_bytes = sum(self.row_bytes.values())  # of all rows of one position, at most
        # A row may be the last one until the next token is known.
        self._is_last_open = any(capture.where.last_from is not None for capture in plan.captures)
        self._selections = [
            ScoreSelection(replace(capture.where, last_from=None)) for capture in plan.captures
        ]

    def stop(self, length: int) -> int:
        """Return the position below which captures are decided, while so many tokens are known."""
        return max(0, length - 1 - self._is_last_open)

    def size_of(self, rows: Activations) -> int:
        return sum(self.row_bytes[tap] * count for tap, count in rows.counts().items())

    def decided(
        self,
        captures: tuple[int, ...],
        blocks: Sequence[ResultBlock],
        tokens: Ints,
        start: int = 0,
    ) -> Activations:
        """Return the rows that captures, by index, select whatever tokens follow."""
        plan = self._plan.only(captures)
        start = max(start, min((int(block.positions[0]) for block in blocks), default=0))
        stop = max((int(block.positions[-1]) + 1 for block in blocks), default=0)
        stop = max(start, min(stop, len(tokens)))

        def selected(chosen: tuple[int, ...]) -> Ints:
            parts = [
                self._selections[captures[index]].within(start, stop, tokens) for index in chosen
            ]
            return np.unique(np.concatenate(parts))

        return activations_of(plan, blocks, selected, torch.from_numpy(tokens), self._no_rows)

    def final(
        self, captures: tuple[int, ...], blocks: Sequence[ResultBlock], tokens: list[int]
    ) -> Activations:
        """Return the rows that captures, by index, select in a completion that has ended."""
        plan = self._plan.only(captures)
        return activations_of(plan, blocks, select_final(plan, tokens), tokens, self._no_rows)
