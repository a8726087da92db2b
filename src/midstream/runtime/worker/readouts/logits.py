"""Logits of captured rows, computed after a step by the model's own head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from midstream.plan.resolved import LensMap
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.worker.readouts.head_adapters import HeadAdapters
from midstream.runtime.worker.readouts.lens import RankLens
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns

# Logits of a step that take more device memory than this, and than a quarter of what is free there,
# are copied to the host in parts: those of all prompt tokens, of the whole vocabulary, can take
# gigabytes.
MOST_BYTES = 256 << 20

# Device memory that logits take at a time, beside the rows themselves. The head reads its weights
# once for each part.
PART_BYTES = 256 << 20

_BLOCK = 128  # tokens of a block, see `largest`


class Head:
    """Computes logits of the final norm's outputs. All ranks must call it alike."""

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Any],
        vocabulary: int,
        adapters: HeadAdapters | None = None,
    ) -> None:
        self._compute_logits = compute_logits
        self._vocabulary = vocabulary
        self._adapters = adapters

    def __call__(self, hidden: Tensor, rows: Ints) -> Tensor | None:
        """Return logits of vectors [n, hidden] of the batch's rows; None: another rank has them."""
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
        """Yield logits of rows in parts of `workspace` bytes, each with its first row's number."""
        # The head's output, the same in float32, and what the sum of exponentials takes.
        step = max(1, workspace // (4 * 3 * self._vocabulary))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            yield first, self(hidden(first, first + len(part)), part)


class LogitQuery(NamedTuple):
    """Records of a step whose logits are asked for, all of one encoding."""

    codec: int
    nth: int  # number of its pattern
    columns: PatternColumns
    rows: Ints  # [n], row of the batch of each record
    units: Ints  # [n], where each vector begins in the step's part of the ring
    tokens: Ints  # [n, tokens] of `logits_of` and `lens`; else [n, 0]


# Rows of logits, float32 [n, size], by number of the encoding and of its pattern.
StepLogits = dict[tuple[int, int], Tensor]


class LogitReader:
    """Computes logits on the worker, after the forward pass of a step, on the current stream."""

    def __init__(self, head: Head, workspace: int, lens: RankLens | None = None) -> None:
        self._head = head
        self._workspace = workspace
        self._lens = lens

    def rows(self, queries: Sequence[LogitQuery], units: Tensor) -> StepLogits:
        """Return this rank's rows of logits of a step, on the host if the device has no room for
        them. The order is that of the batch and of each row's patterns, the same on every rank.
        """
        device = units.device
        forms = _by_form(queries)
        nbytes = sum(4 * len(q.rows) * q.columns.size for q in queries if q.columns.is_row)
        on_host = nbytes > MOST_BYTES and nbytes > _free_bytes(device) // 4
        out = torch.device("cpu") if on_host else device
        groups = [_Group(form, device, out) for form in forms]
        rows, nths, places = map(np.concatenate, zip(*map(_places, forms), strict=True))
        sizes = [sum(len(query.rows) for query in form) for form in forms]
        order = np.lexsort((nths, rows))
        group = np.repeat(np.arange(len(forms)), sizes)[order]
        target = np.concatenate([np.arange(size) for size in sizes])[order]
        read = _Stream(forms, order)
        begin = on_device(torch.from_numpy(places[order]), device)
        within = torch.arange(queries[0].columns.width // units.shape[1], device=device)

        def hidden(first: int, stop: int) -> Tensor:
            return self._normed(units[begin[first:stop, None] + within].flatten(1), read, first)

        for first, logits in self._head.in_parts(rows[order], hidden, self._workspace):
            if logits is None:
                continue
            of = group[first : first + len(logits)]
            for index in np.unique(of).tolist():
                at = np.flatnonzero(of == index)
                groups[index].set(target[first + at], logits, at)
        return {key: rows for logit_group in groups for key, rows in logit_group.rows()}

    def _normed(self, vectors: Tensor, read: _Stream, first: int) -> Tensor:
        """Return what the head reads of vectors, changed in place; lenses have the stream."""
        number = read.number[first : first + len(vectors)]
        chosen = np.flatnonzero(number >= 0)
        if not chosen.size:
            return vectors
        assert self._lens is not None
        for index in np.unique(number[chosen]).tolist():
            if read.maps[index].matrix >= 0:
                at = _index(np.flatnonzero(number == index), vectors.device)
                vectors[at] = self._lens.mapped(vectors[at], read.maps[index])
        at = _index(chosen, vectors.device)
        vectors[at] = self._lens(vectors[at])
        return vectors


class _Stream:
    """Which vectors are the stream: the number of each one's map; −1: an output of the norm."""

    def __init__(self, forms: Sequence[Sequence[LogitQuery]], order: Ints) -> None:
        numbers: dict[LensMap, int] = {}
        every = []
        for query in (query for form in forms for query in form):
            columns, number = query.columns, -1
            if columns.map is not None:
                number = numbers.setdefault(columns.map, len(numbers))
            every.append(np.full(len(query.rows), number))
        self.maps = list(numbers)
        self.number = np.concatenate(every)[order]


class _Group:
    """The rows of all queries of one form, one query after the other."""

    def __init__(
        self, queries: Sequence[LogitQuery], device: torch.device, out: torch.device
    ) -> None:
        self._queries = queries
        self._columns = queries[0].columns
        tokens = np.concatenate([query.tokens for query in queries])
        self._tokens = on_device(torch.from_numpy(tokens), device)
        size = len(tokens) if self._columns.is_row else 0, self._columns.size
        self._out = torch.empty(size, dtype=torch.float32, device=out)

    def set(self, to: Ints, logits: Tensor, at: Ints) -> None:
        """Set rows by the logits of some rows of a part, if this rank returns them."""
        if self._columns.is_row:
            device, out = logits.device, self._out.device
            tokens = self._tokens[_index(to, device)]
            row = _row(logits[_index(at, device)], self._columns, tokens)
            self._out[_index(to, out)] = row.to(out)

    def rows(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield the rows of each query, with its key in `StepLogits`, if this rank returns them."""
        if self._columns.is_row:
            parts = self._out.split([len(query.rows) for query in self._queries])
            for query, rows in zip(self._queries, parts, strict=True):
                yield (query.codec, query.nth), rows


def _free_bytes(device: torch.device) -> int:
    """Return the device memory that tensors can take, in bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _by_form(queries: Sequence[LogitQuery]) -> list[list[LogitQuery]]:
    """Group queries whose rows have the same contents: the layers of a lens are one group."""
    groups: dict[tuple[Any, ...], list[LogitQuery]] = {}
    for query in queries:
        columns = query.columns
        form = columns.kind, columns.size, query.tokens.shape[1], columns.is_row
        groups.setdefault(form, []).append(query)
    return list(groups.values())


def _places(queries: Sequence[LogitQuery]) -> tuple[Ints, Ints, Ints]:
    """Return for each record its row of the batch, its pattern's number, its vector's begin."""
    rows = np.concatenate([query.rows for query in queries])
    nths = np.repeat([query.nth for query in queries], [len(query.rows) for query in queries])
    return rows, nths, np.concatenate([query.units for query in queries])


def _index(numbers: Ints, device: torch.device) -> Tensor | slice:
    """Return an index of these rows: a slice, which copies nothing, if they are neighbours."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers) and (np.diff(numbers) == 1).all():
        return slice(first, last + 1)
    return on_device(torch.from_numpy(np.ascontiguousarray(numbers)), device)


def _row(logits: Tensor, columns: PatternColumns, tokens: Tensor) -> Tensor:
    total = torch.logsumexp(logits, -1, keepdim=True)
    if columns.kind == "lens":
        return _lens_row(logits, columns.size, tokens, total)
    if columns.kind == "logits_all":
        return torch.cat((logits, total), -1)
    if columns.kind == "logits_of":
        return torch.cat((logits.gather(1, tokens), total), -1)
    values, ids = largest(logits, columns.size // 2)
    return torch.cat((ids.int().view(torch.float32), values, total), -1)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's largest logits, [n, count], descending, and tokens, of its best blocks."""
    size = logits.shape[1]
    if count > size // _BLOCK // 4:
        values, ids = logits.topk(count, -1)
        return values, ids
    lacking = -size % _BLOCK
    padded = pad(logits, (0, lacking), value=-torch.inf) if lacking else logits
    blocks = padded.unflatten(1, (-1, _BLOCK))
    of = blocks.amax(-1).topk(count, -1).indices
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    candidates = blocks[rows, of].flatten(1)
    values, at = candidates.topk(count, -1)
    return values, of.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


def _lens_row(logits: Tensor, size: int, tokens: Tensor, total: Tensor) -> Tensor:
    """Return rows of a lens; see `Pattern`."""
    count = tokens.shape[1]
    values, ids = largest(logits, (size - 1) // 2 - count)
    chosen = logits.gather(1, tokens)
    # By column: a product of tokens and vocabulary would take the workspace many times over.
    ranks = [1 + (logits > chosen[:, column : column + 1]).sum(-1) for column in range(count)]
    ranked = torch.stack(ranks, -1).int() if ranks else tokens.int()
    parts = (ids.int().view(torch.float32), values, chosen, ranked.view(torch.float32), total)
    return torch.cat(parts, -1)
