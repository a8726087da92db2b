"""Logits of captured rows, computed after a step by the model's own head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.worker.attention.query_run import QueryRun
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns

# Returns the logits [n, tokens] of outputs of the final norm, [n, hidden].
Head = Callable[[Tensor], Tensor]


class LogitReader:
    """Computes logits on the worker, after the forward pass of a step, on the current stream."""

    def __init__(self, head: Head, workspace: int) -> None:
        """Args:
        head: the model's `compute_logits`.
        workspace: device memory in bytes that logits may take at a time, beside the rows
            themselves. Those of one row may take more.
        """
        self._head = head
        self._workspace = workspace
        # Rows at a time: one until the first logits show how large the vocabulary is.
        self._step = 1

    def rows(
        self, nth: int, columns: PatternColumns, hidden: Tensor, runs: Sequence[QueryRun]
    ) -> Tensor:
        """Return the rows of one pattern, float32 [n, size].

        Args:
            nth: number of the pattern.
            columns: what is returned.
            hidden: [n, hidden], outputs of the final norm.
            runs: the runs of all rows, in order.
        """
        out = torch.empty((len(hidden), columns.size), dtype=torch.float32, device=hidden.device)
        has_tokens = columns.kind in ("logits_of", "lens")
        tokens = _tokens(runs, nth, hidden.device) if has_tokens else None
        first = 0
        while first < len(hidden):
            logits = self._head(hidden[first : first + self._step].contiguous()).float()
            last = first + len(logits)
            mine = None if tokens is None else tokens[first:last]
            out[first:last] = _row(logits, columns, mine)
            # The head's output, the same in float32, and what the sum of exponentials takes.
            self._step = max(1, self._workspace // (4 * 3 * logits.shape[1]))
            first = last
        return out


def _row(logits: Tensor, columns: PatternColumns, tokens: Tensor | None) -> Tensor:
    total = torch.logsumexp(logits, -1, keepdim=True)
    if columns.kind == "lens":
        assert tokens is not None
        return _lens_row(logits, columns, tokens, total)
    if columns.kind == "logits_all":
        return torch.cat((logits, total), -1)
    if tokens is not None:
        return torch.cat((logits.gather(1, tokens), total), -1)
    values, ids = logits.topk(columns.size // 2, -1)
    return torch.cat((ids.int().view(torch.float32), values, total), -1)


def _lens_row(logits: Tensor, columns: PatternColumns, tokens: Tensor, total: Tensor) -> Tensor:
    """Return rows of a lens; see `Pattern`."""
    count = tokens.shape[1]
    values, ids = logits.topk((columns.size - 1) // 2 - count, -1)
    chosen = logits.gather(1, tokens)
    # By column: a product of tokens and vocabulary would take the workspace many times over.
    ranks = [1 + (logits > chosen[:, nth : nth + 1]).sum(-1) for nth in range(count)]
    ranked = torch.stack(ranks, -1).int() if ranks else tokens.int()
    parts = (ids.int().view(torch.float32), values, chosen, ranked.view(torch.float32), total)
    return torch.cat(parts, -1)


def _tokens(runs: Sequence[QueryRun], nth: int, device: torch.device) -> Tensor:
    """Return the tokens of each row, int64 [n, tokens]."""
    each = [
        [token for first, stop in run.keys[nth] for token in range(first, stop or 0)]
        for run in runs
    ]
    lengths = [run.length for run in runs]
    found = np.repeat(np.array(each, np.int64), lengths, axis=0)
    return on_device(torch.from_numpy(found), device)
