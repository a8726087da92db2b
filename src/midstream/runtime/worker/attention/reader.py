"""Rows of attention of one step: the queries in the staging ring against the keys in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.runtime.worker.attention import weights as op
from midstream.runtime.worker.attention.layers import AttentionLayer
from midstream.runtime.worker.attention.lens import RankLens
from midstream.runtime.worker.attention.logits import Head, LogitReader, StepLogits
from midstream.runtime.worker.attention.queries import logits_of
from midstream.runtime.worker.attention.query_run import QueryRun
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding
from midstream.spec.positions.ranges import Ranges

# Device memory that rows of attention may take at a time, beside the rows themselves. A single
# query of a very long request may take more: 4 bytes for each head and key.
WORKSPACE_BYTES = 64 << 20

# Returns the blocks of each request of the batch, integers [requests, blocks], by KV cache group.
BlockTable = Callable[[int], Tensor]


class PatternReader:
    """Computes rows of attention on the worker, after the forward pass of a step.

    All work is queued on the current stream, so it is done before a later step writes to the cache.
    """

    def __init__(
        self,
        layers: Callable[[int], AttentionLayer],
        block_table: BlockTable,
        workspace: int = WORKSPACE_BYTES,
        head: Head | None = None,
        lens: RankLens | None = None,
    ) -> None:
        """Args:
        layers: returns the attention that reads the queries of a tap, by the tap's index.
        block_table: returns the blocks of the batch's requests.
        workspace: see `WORKSPACE_BYTES`.
        head: the model's head; None: no request asks for logits.
        lens: applies maps and the final norm; None: no request asks for a lens.
        """
        self._layers = layers
        self._block_table = block_table
        self._workspace = workspace
        self._logits = None if head is None else LogitReader(head, workspace, lens)

    def logits(
        self,
        prepared: PreparedStep,
        encoding: Callable[[int], RowEncoding],
        slots: SlotTable,
        ring: Tensor,
    ) -> StepLogits:
        """Return the logits of all records of a step whose logits are asked for.

        Args:
            prepared: the step.
            encoding: returns the encoding with a number.
            slots: the requests.
            ring: [units, U], the staging ring.
        """
        queries = logits_of(prepared, encoding, slots, ring.shape[1])
        if not queries:
            return {}
        assert self._logits is not None
        first = prepared.first
        return self._logits.rows(queries, ring[first : first + prepared.plan.num_units])

    def encode(
        self,
        encoding: PatternEncoding,
        records: Tensor,
        positions: Tensor,
        runs: Sequence[QueryRun],
        logits: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Return encoded records, uint8 [n, row_bytes].

        Args:
            encoding: their encoding.
            records: [n, numbers], the captured vectors, queries among them.
            positions: int64 [n], position of each record.
            runs: the runs of all records, in order.
            logits: rows of logits of the records, by number of the pattern.
        """
        row_bytes = encoding.row_bytes(records.dtype)
        out = torch.empty((records.shape[0], row_bytes), dtype=torch.uint8, device=records.device)
        end = encoding.encode_vectors(records, out)
        tiles = _Tiles(runs, positions, self._workspace)
        for nth, columns in enumerate(encoding.patterns):
            if not columns.is_row:
                continue
            rows = logits[nth] if columns.of_logits else self._rows(nth, columns, records, tiles)
            out[:, end : end + columns.nbytes] = rows.view(torch.uint8)
            end += columns.nbytes
        return out

    def score(
        self,
        encoding: PatternEncoding,
        records: Tensor,
        positions: Tensor,
        runs: Sequence[QueryRun],
        places: Tensor,
        out: Tensor,
    ) -> None:
        """Write the scores that are made of attention: the mean over the heads of all ranks. With
        several ranks each writes its part of the sum.

        Args:
            encoding, records, positions, runs: see `encode`.
            places: int64 [n], row of `out` of each record.
            out: float32 [rows, slots], to be written.
        """
        tiles = _Tiles(runs, positions, self._workspace)
        for nth, columns in enumerate(encoding.patterns):
            if columns.slot is None:
                continue
            if columns.count:
                score = self._rows(nth, columns, records, tiles).sum(1) / columns.divisor
            else:
                score = out.new_zeros(len(records))
            out[:, columns.slot].index_copy_(0, places, score)

    def _rows(self, nth: int, columns: PatternColumns, records: Tensor, tiles: _Tiles) -> Tensor:
        """Return the rows of one pattern, float32 [n, heads · size]."""
        layer = self._layers(columns.tap)
        queries = records[:, columns.start : columns.start + columns.width]
        queries = queries.unflatten(1, (layer.key_heads.numel(), -1))
        form, key_heads = layer.form, layer.key_heads
        if columns.heads:
            heads = _index(columns.heads, records.device)
            queries, form = queries[:, heads], form.of_heads(heads)
            key_heads = key_heads[heads]
        table = self._block_table(layer.group)
        size = records.shape[0], columns.count, columns.size
        out = torch.empty(size, dtype=torch.float32, device=records.device)
        queries = layer.queries(queries)
        reading = _Reading(layer, form, key_heads, table, columns, self._workspace)
        for tile in tiles.of(columns.count, layer.form.window):
            found = queries[tile.at].unflatten(0, (-1, tile.positions.shape[1]))
            out[tile.at] = reading.rows(found, tile, nth).flatten(0, 1)
        return out.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Rows that are computed together: several runs of one row, or some rows of one run.

    Attributes:
        runs: the runs.
        at: their records, as an index of those of the step.
        positions: int64 [runs, rows].
        requests: int64 [runs], index of each one's request in the batch.
        begin, stop: positions of the keys that the rows see.
        chosen: by the last key + 1 and the ranges of a mass of each run: which keys they are; see
            `chosen_keys`.
    """

    runs: Sequence[QueryRun]
    at: Tensor | slice
    positions: Tensor
    requests: Tensor
    begin: int
    stop: int
    chosen: dict[tuple[int, tuple[Ranges, ...]], Tensor]

    @classmethod
    def of(cls, runs: Sequence[QueryRun], window: int, positions: Tensor) -> _Tile:
        """Return the tile of some runs; `positions` are those of all records."""
        device, first = positions.device, runs[0]
        at: Tensor | slice = slice(first.record, first.record + first.length)
        if len(runs) > 1:
            at = on_device(torch.tensor([run.record for run in runs]), device)
        requests = on_device(torch.tensor([run.request for run in runs]), device)
        given = positions[at].view(len(runs), -1)
        return cls(runs, at, given, requests, *_span(runs, window), {})

    def keys_of_mass(self, nth: int, stop: int) -> Tensor:
        """Return the keys [begin, stop) of the pattern's mass, by its number."""
        ranges = tuple(run.keys[nth] for run in self.runs)
        key = stop, ranges
        if key not in self.chosen:
            device = self.positions.device
            self.chosen[key] = on_device(op.chosen_keys(ranges, self.begin, stop), device)
        return self.chosen[key]


class _Tiles:
    """The tiles of a step's records."""

    def __init__(self, runs: Sequence[QueryRun], positions: Tensor, workspace: int) -> None:
        """Args:
        runs: the runs of all records, in order.
        positions: int64 [n], position of each record.
        workspace: see `WORKSPACE_BYTES`.
        """
        self._runs = runs
        self._positions = positions
        self._workspace = workspace
        self._known: dict[tuple[int, int], list[_Tile]] = {}

    def of(self, heads: int, window: int) -> list[_Tile]:
        """Return the tiles for a number of heads and a window."""
        found = self._known.get((heads, window))
        if found is None:
            batches = _batches(self._runs, heads, window, self._workspace)
            found = [_Tile.of(some, window, self._positions) for some in batches]
            self._known[heads, window] = found
        return found


@dataclass(frozen=True, slots=True)
class _Reading:
    """One pattern of some records; see `PatternReader` and `scores`."""

    layer: AttentionLayer
    form: op.AttentionForm
    key_heads: Tensor
    table: Tensor
    columns: PatternColumns
    workspace: int

    def rows(self, queries: Tensor, tile: _Tile, nth: int) -> Tensor:
        """Return rows [runs, rows, heads, size].

        Args:
            queries: [runs, rows, heads, head_dim].
            tile: what is computed.
            nth: number of the pattern.
        """
        begin = tile.begin
        # Where only the device knows positions, the host's bounds may be beyond the last block.
        stop = min(tile.stop, self.table.shape[1] * self.layer.layout.size)
        scores = self._scores(queries, tile, stop)
        if self.columns.kind == "scores":
            return op.full(scores, begin, self.columns.size, -torch.inf)
        weights = op.softmax(scores, self.form)
        match self.columns.kind:
            case "top":
                return op.top_keys(weights, begin, self.columns.size // 2)
            case "mass":
                return op.mass(weights, tile.keys_of_mass(nth, stop))
            case "entropy":
                return op.entropy(weights)
            case "full":
                return op.full(weights, begin, self.columns.size)
            case other:
                raise AssertionError(other)

    def _scores(self, queries: Tensor, tile: _Tile, stop: int) -> Tensor:
        begin, form = tile.begin, self.form
        keys = self.layer.all_keys()
        if queries.is_cuda and keys is not None and _kernel_reads(keys.dtype, keys.device):
            from midstream.runtime.worker.attention.scores_kernel import scores_triton

            given = queries if keys.itemsize == 1 else queries.to(keys.dtype)
            return scores_triton(
                given, tile.positions, keys, self.table, tile.requests,
                self.key_heads, begin, stop, scale=form.scale, soft_cap=form.soft_cap,
                window=form.window, slopes=form.slopes,
            )  # fmt: skip
        size = self.layer.layout.size

        def read(first: int, last: int) -> Tensor:
            blocks = self.table[tile.requests, first // size : -(-last // size)]
            found = self.layer.keys(blocks)
            return found[:, first % size : first % size + last - first]

        per_key = len(tile.runs) * self.columns.count * queries.shape[-1] * 4
        step = max(size, self.workspace // 2 // per_key // size * size)
        shared = None if not self.columns.heads else self.key_heads
        return op.scores(queries, tile.positions, read, begin, stop, shared, form, step)


@lru_cache(maxsize=8)
def _kernel_reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the Triton kernel can read keys of this format."""
    return dtype != torch.float8_e4m3fn or torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


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
