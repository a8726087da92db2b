"""Biases of logits, which instructions at the tap `logits` switch, after `compute_logits`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.errors import TapError
from midstream.plan.resolved import ResolvedBias
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.runtime.worker.tables.device_buffers import on_device

# Returns what a request adds to the logits at a position, under the version of its plan there.
BiasesAt = Callable[[int], Sequence[ResolvedBias]]
MOST = 64  # biases of a request


def num_switches(hidden_size: int) -> int:
    """Return the switches of a token: a power of two that divides the hidden size."""
    count = MOST
    while hidden_size % count:
        count //= 2
    return count


class LogitBias:
    """Adds the biases of a step's requests to its logits."""

    def __init__(self, switches: Tensor) -> None:
        self._switches = switches
        # Of the step whose logits are computed next: their number of rows, and int64 [3, m] of
        # logits row, token row and switch, int64 [m] token ids and float32 [m] values.
        self._pending: tuple[int, Tensor, Tensor, Tensor] | None = None

    def prepare(
        self, batch: StepBatch, plan: StepPlan, biases_of: Callable[[str], BiasesAt | None]
    ) -> None:
        """Clear the switches for the step that is queued next; `biases_of` gives None for none."""
        self._pending = None
        having = [
            (row, request_biases)
            for row, name in enumerate(batch.request_ids)
            if (request_biases := biases_of(name)) is not None
        ]
        if not having:
            return
        places: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        values: list[float] = []
        # Tokens are sampled from a request's last row, and before it from those before its drafts.
        sampled = np.ones(len(batch.request_ids), np.int64)
        if batch.drafts is not None:
            sampled += batch.drafts
        first_logits = np.cumsum(sampled) - sampled
        first_tokens = np.cumsum(batch.scheduled) - sampled
        # Where a position is an upper bound, the same version of the plan holds at both.
        positions = np.full(batch.num_tokens, -1)
        positions[plan.active] = plan.positions
        for row, biases_at in having:
            for place in range(int(sampled[row])):
                token_row = int(first_tokens[row]) + place
                position = int(positions[token_row])
                for index, bias in enumerate(biases_at(position) if position >= 0 else ()):
                    where = int(first_logits[row]) + place, token_row, index
                    places += [where] * len(bias.tokens)
                    tokens += bias.tokens
                    values += bias.values
        if not places:
            return
        device = self._switches.device
        self._switches[: batch.num_tokens].zero_()
        self._pending = (
            int(sampled.sum()),
            on_device(torch.tensor(places).T.contiguous(), device),
            on_device(torch.tensor(tokens), device),
            on_device(torch.tensor(values, dtype=torch.float32), device),
        )

    def drop(self) -> None:
        """Forget the step that was prepared: its forward pass has no biases."""
        self._pending = None

    def attach(self, model: Any) -> None:
        """Wrap `compute_logits`: its first call after a forward pass is of the sampled rows."""
        compute_logits: Any = model.compute_logits

        def compute_logits_biased(*args: Any, **kwargs: Any) -> Any:
            return self._add(compute_logits(*args, **kwargs))

        # Not a parameter nor a module: `nn.Module` keeps it as a plain attribute.
        model.compute_logits = compute_logits_biased

    def _add(self, logits: Tensor | None) -> Tensor | None:
        pending, self._pending = self._pending, None
        if pending is None or logits is None:  # another rank has them
            return logits
        rows, places, tokens, values = pending
        if logits.shape[0] != rows:
            raise TapError(
                f"compute_logits returned {logits.shape[0]} rows where {rows} tokens are sampled"
            )
        on = self._switches[places[1], places[2]]
        # Sampling is in float32 as well: nothing changes for the other rows.
        biased_logits = logits.float()
        return biased_logits.index_put_((places[0], tokens), on * values, accumulate=True)
