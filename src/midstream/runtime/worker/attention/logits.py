"""Logits of captured rows, computed after a step by the model's own head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from midstream.runtime.protocol.runs import Ints
from midstream.runtime.worker.attention.head_adapters import HeadAdapters
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns

# Logits of a step that take more device memory than this are copied to the host in parts: those of
# the whole vocabulary, of each token of a prompt, can take gigabytes.
MOST_BYTES = 256 << 20


class Head:
    """Computes logits of outputs of the final norm, as the model's own `compute_logits` does.

    Under tensor parallelism each rank has the part of the head of some tokens, and vLLM joins the
    parts of all ranks. So every rank must call this for the same vectors in the same order; a rank
    that does not would make the others wait for ever.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Any],
        vocabulary: int,
        adapters: HeadAdapters | None = None,
    ) -> None:
        """Args:
        compute_logits: the model's, without biases.
        vocabulary: number of tokens. What `compute_logits` returns beyond it is padding; a token
            that the head lacks has the logit −∞.
        adapters: the head's LoRA adapters; None: the engine has no LoRA.
        """
        self._compute_logits = compute_logits
        self._vocabulary = vocabulary
        self._adapters = adapters

    def __call__(self, hidden: Tensor, rows: Ints) -> Tensor | None:
        """Return the logits, float32 [n, vocabulary]; None: another rank has them.

        Args:
            hidden: [n, hidden], in the model's dtype.
            rows: int64 [n], the row of the step's batch of each; its request's adapter applies.
        """
        if self._adapters is None:
            return self._logits(hidden)
        with self._adapters.of_rows(on_device(torch.from_numpy(rows), hidden.device)):
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor | None:
        logits: Tensor | None = self._compute_logits(hidden.contiguous())
        if logits is None:
            return None
        logits = logits[:, : self._vocabulary].float()
        lacking = self._vocabulary - logits.shape[1]
        return pad(logits, (0, lacking), value=-torch.inf) if lacking else logits

    def in_parts(
        self, rows: Ints, hidden: Callable[[int, int], Tensor], workspace: int
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the logits of some rows in parts, each with the number of its first row.

        Args:
            rows: int64 [n], see `__call__`.
            hidden: returns the outputs of the final norm of the rows [first, stop).
            workspace: device memory in bytes that a part may take. One row may take more.
        """
        # The head's output, the same in float32, and what the sum of exponentials takes.
        step = max(1, workspace // (4 * 3 * self._vocabulary))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            yield first, self(hidden(first, first + len(part)), part)


class LogitQuery(NamedTuple):
    """Records of a step whose logits are asked for, all of one encoding.

    Attributes:
        codec: number of the encoding.
        nth: number of its pattern.
        columns: the pattern.
        rows: int64 [n], row of the batch of each record.
        units: int64 [n], unit of the step's part of the ring at which each record's vector begins.
        tokens: of `logits_of`, the tokens of each record, int64 [n, tokens]; else [n, 0].
    """

    codec: int
    nth: int
    columns: PatternColumns
    rows: Ints
    units: Ints
    tokens: Ints


# Rows of logits, float32 [n, size], by number of the encoding and of its pattern.
StepLogits = dict[tuple[int, int], Tensor]


class LogitReader:
    """Computes logits on the worker, after the forward pass of a step, on the current stream."""

    def __init__(self, head: Head, workspace: int) -> None:
        """Args:
        head: the model's head.
        workspace: see `Head.in_parts`.
        """
        self._head = head
        self._workspace = workspace

    def rows(self, queries: Sequence[LogitQuery], units: Tensor) -> StepLogits:
        """Return the rows of logits of a step that this rank returns. All records go through the
        head together, in the order of the batch, which is the same on every rank. They are on the
        host if they take more than `MOST_BYTES`.

        Args:
            queries: the records.
            units: [units, U], the step's part of the ring.
        """
        device = units.device
        returned = [query for query in queries if query.columns.returned]
        nbytes = sum(4 * len(query.rows) * query.columns.size for query in returned)
        target = device if nbytes <= MOST_BYTES else torch.device("cpu")
        found: StepLogits = {
            (query.codec, query.nth): torch.empty(
                (len(query.rows), query.columns.size), dtype=torch.float32, device=target
            )
            for query in returned
        }
        tokens = [on_device(torch.from_numpy(query.tokens), device) for query in queries]
        rows = np.concatenate([query.rows for query in queries])
        order = np.argsort(rows, kind="stable")
        source = np.repeat(np.arange(len(queries)), [len(query.rows) for query in queries])[order]
        record = np.concatenate([np.arange(len(query.rows)) for query in queries])[order]
        place = np.concatenate([query.units for query in queries])[order]
        places = on_device(torch.from_numpy(place), device)
        width = queries[0].columns.width // units.shape[1]
        within = torch.arange(width, device=device)

        def hidden(first: int, stop: int) -> Tensor:
            return units[places[first:stop, None] + within].flatten(1)

        for first, logits in self._head.in_parts(rows[order], hidden, self._workspace):
            if logits is None:
                continue
            mine = source[first : first + len(logits)]
            for nth in np.unique(mine).tolist():
                query = queries[nth]
                if query.columns.returned:
                    at = np.flatnonzero(mine == nth)
                    to = record[first + at]
                    asked = tokens[nth][_index(to, device)]
                    row = _row(logits[_index(at, device)], query.columns, asked)
                    found[query.codec, query.nth][_index(to, target)] = row.to(target)
        return found


def _index(numbers: Ints, device: torch.device) -> Tensor | slice:
    """Return an index of these rows: a slice, which copies nothing, if they are neighbours."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers) and (np.diff(numbers) == 1).all():
        return slice(first, last + 1)
    return on_device(torch.from_numpy(np.ascontiguousarray(numbers)), device)


def _row(logits: Tensor, columns: PatternColumns, tokens: Tensor) -> Tensor:
    total = torch.logsumexp(logits, -1, keepdim=True)
    if columns.kind == "logits_all":
        return torch.cat((logits, total), -1)
    if columns.kind == "logits_of":
        return torch.cat((logits.gather(1, tokens), total), -1)
    values, ids = logits.topk(columns.size // 2, -1)
    return torch.cat((ids.int().view(torch.float32), values, total), -1)
