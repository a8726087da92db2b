"""Rows of attention of one step: the queries in the staging ring against the keys in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.runtime.worker.attention import weights as op
from midstream.runtime.worker.attention.layers import AttentionLayer
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding
from midstream.spec.positions.ranges import Ranges

# Device memory that rows of attention may take at a time, beside the rows themselves. A single
# query of a very long request may take more: 4 bytes for each head and key.
WORKSPACE_BYTES = 64 << 20

# Returns the blocks of each request of the batch, integers [requests, blocks], by KV cache group.
BlockTable = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one request, in consecutive records.

    Attributes:
        request: index of the request in the batch.
        record: index of the first record.
        length: number of records.
        lowest: position of the first row, or a lower bound.
        position: position of the first row, or an upper bound.
        keys: for each `PatternColumns`, the positions of a mass.
    """

    request: int
    record: int
    length: int
    lowest: int
    position: int
    keys: tuple[Ranges, ...]


class PatternReader:
    """Computes rows of attention on the worker, after the forward pass of a step.

    All work is queued on the current stream, so it is done before a later step writes to the cache.
    """

    def __init__(
        self,
        layers: Callable[[int], AttentionLayer],
        block_table: BlockTable,
        workspace: int = WORKSPACE_BYTES,
    ) -> None:
        """Args:
        layers: returns the attention that reads the queries of a tap, by the tap's index.
        block_table: returns the blocks of the batch's requests.
        workspace: see `WORKSPACE_BYTES`.
        """
        self._layers = layers
        self._block_table = block_table
        self._workspace = workspace

    def encode(
        self,
        encoding: PatternEncoding,
        records: Tensor,
        positions: Tensor,
        runs: Sequence[QueryRun],
    ) -> Tensor:
        """Return encoded records, uint8 [n, row_bytes].

        Args:
            encoding: their encoding.
            records: [n, numbers], the captured vectors, queries among them.
            positions: int64 [n], position of each record.
            runs: the runs of all records, in order.
        """
        row_bytes = encoding.row_bytes(records.dtype)
        out = torch.empty((records.shape[0], row_bytes), dtype=torch.uint8, device=records.device)
        end = encoding.encode_vectors(records, out)
        for nth, columns in enumerate(encoding.patterns):
            rows = self._rows(nth, columns, records, positions, runs)
            out[:, end : end + columns.nbytes] = rows.view(torch.uint8)
            end += columns.nbytes
        return out

    def _rows(
        self,
        nth: int,
        columns: PatternColumns,
        records: Tensor,
        positions: Tensor,
        runs: Sequence[QueryRun],
    ) -> Tensor:
        """Return the rows of one pattern, float32 [n, heads · size]."""
        layer = self._layers(columns.tap)
        queries = records[:, columns.start : columns.start + columns.width]
        queries = queries.unflatten(1, (layer.key_heads.numel(), -1))
        form, key_heads = layer.form, None
        if columns.heads:
            heads = torch.tensor(columns.heads, device=records.device)
            queries, form = queries[:, heads], form.of_heads(heads)
            key_heads = layer.key_heads[heads]
        table = self._block_table(layer.group)
        out = torch.empty(
            (records.shape[0], columns.count, columns.size),
            dtype=torch.float32,
            device=records.device,
        )
        reading = _Reading(layer, form, key_heads, table, columns, self._workspace)
        for some in _batches(runs, columns.count, form.window, self._workspace):
            first = some[0]
            if len(some) == 1:
                at = slice(first.record, first.record + first.length)
                shape = (1, first.length)
            else:
                at = torch.tensor([run.record for run in some], device=records.device)  # type: ignore[assignment]
                shape = (len(some), 1)
            rows = reading.rows(
                queries[at].unflatten(0, shape),
                positions[at].view(shape),
                some,
                [run.keys[nth] for run in some],
            )
            out[at] = rows.flatten(0, 1)
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One pattern of some records; see `PatternReader` and `attention_weights`."""

    layer: AttentionLayer
    form: op.AttentionForm
    key_heads: Tensor | None
    table: Tensor
    columns: PatternColumns
    workspace: int

    def rows(
        self,
        queries: Tensor,
        positions: Tensor,
        runs: Sequence[QueryRun],
        keys: Sequence[Ranges],
    ) -> Tensor:
        """Return rows [runs, rows, heads, size].

        Args:
            queries: [runs, rows, heads, head_dim].
            positions: int64 [runs, rows].
            runs: several of one row, or a single one.
            keys: the positions of a mass, for each run.
        """
        begin, stop = _span(runs, self.form.window)
        size = self.layer.layout.size
        # Where only the device knows positions, the host's bounds may be beyond the last block.
        stop = min(stop, self.table.shape[1] * size)
        requests = torch.tensor([run.request for run in runs], device=self.table.device)

        def read(first: int, last: int) -> Tensor:
            blocks = self.table[requests, first // size : -(-last // size)]
            found = self.layer.keys(blocks)
            return found[:, first % size : first % size + last - first]

        head_dim = queries.shape[-1]
        per_key = len(runs) * self.columns.count * head_dim * 4
        step = max(size, self.workspace // 2 // per_key // size * size)
        weights = op.attention_weights(
            queries, positions, read, begin, stop, self.key_heads, self.form, step
        )
        match self.columns.kind:
            case "top":
                return op.top_keys(weights, begin, self.columns.size // 2)
            case "mass":
                chosen = op.chosen_keys(keys, begin, stop, weights.device)
                return op.mass(weights, chosen)
            case "entropy":
                return op.entropy(weights)
            case "full":
                return op.full(weights, begin, self.columns.size)


def _span(runs: Sequence[QueryRun], window: int) -> tuple[int, int]:
    """Return the first position of a key that a row of the runs sees, and the last + 1."""
    begin = max(0, min(run.lowest for run in runs) - window + 1) if window else 0
    return begin, max(run.position + run.length for run in runs)


def _batches(
    runs: Sequence[QueryRun], heads: int, window: int, workspace: int
) -> list[list[QueryRun]]:
    """Return the runs in groups that are computed together: several of one row, or a part of one
    run. The weights of a group take half of the workspace at most, if it has several rows.

    Args:
        runs: the runs.
        heads: number of heads.
        window: see `AttentionForm`.
        workspace: bytes.
    """
    # The products, what a softmax makes of them, and the distances.
    limit = workspace // 2 // (4 * heads * 3)
    found: list[list[QueryRun]] = []
    single: list[QueryRun] = []
    for run in sorted(runs, key=lambda run: run.position):
        if run.length == 1:
            begin, stop = _span([*single, run], window)
            if single and (len(single) + 1) * (stop - begin) > limit:
                found.append(single)
                single = []
            single.append(run)
            continue
        begin, stop = _span([run], window)
        rows = max(1, limit // (stop - begin))
        for first in range(0, run.length, rows):
            count = min(rows, run.length - first)
            found.append(
                [
                    QueryRun(
                        run.request,
                        run.record + first,
                        count,
                        run.lowest + first,
                        run.position + first,
                        run.keys,
                    )
                ]
            )
    return [*found, single] if single else found
