"""Rows of attention of one step: the queries in the staging ring against the keys in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.runtime.worker.readouts import weights as op
from midstream.runtime.worker.readouts.layers import AttentionLayer
from midstream.runtime.worker.readouts.logits import LogitReader, StepLogits
from midstream.runtime.worker.readouts.queries import logits_of
from midstream.runtime.worker.readouts.sae import SaeReader
from midstream.runtime.worker.readouts.tiles import QueryRun, Tile, Tiles, most_cells
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding

# Device memory that rows of attention may take at a time, beside the rows themselves. A single
# query of a very long request may take more: 4 bytes for each head and key.
WORKSPACE_BYTES = 64 << 20

_CHOICES = 1024  # of heads of a layer that are remembered

# Returns the blocks of each request of the batch, integers [requests, blocks], by KV cache group.
BlockTable = Callable[[int], Tensor]


class PatternReader:
    """Computes rows of attention after a forward pass, on its stream: before the cache changes."""

    def __init__(
        self,
        layers: Callable[[int], AttentionLayer],
        block_table: BlockTable,
        workspace: int = WORKSPACE_BYTES,
        logits: LogitReader | None = None,
        saes: SaeReader | None = None,
    ) -> None:
        self._layers = layers
        self._block_table = block_table
        self._workspace = workspace
        self._logits = logits
        self._saes = saes
        # By tap and heads: what attention does for these, their key-value heads, and the heads.
        self._chosen: dict[
            tuple[int, tuple[int, ...]], tuple[op.AttentionForm, Tensor, Tensor]
        ] = {}

    def logits(
        self,
        prepared: PreparedStep,
        encoding: Callable[[int], RowEncoding],
        slots: SlotTable,
        ring: Tensor,
    ) -> StepLogits:
        """Return the logits of a step's records that ask for them; `ring` is [units, U]."""
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
        """Return encoded records, uint8 [n, row_bytes], on the host if their logits are."""
        row_bytes = encoding.row_bytes(records.dtype)
        (device,) = {rows.device for rows in logits.values()} or {records.device}
        out = torch.empty((records.shape[0], row_bytes), dtype=torch.uint8, device=device)
        end = encoding.encode_vectors(records, out)
        begins, reads, made = [], [], []
        for index, columns in enumerate(encoding.patterns):
            begins.append(end)
            if not columns.is_row:
                continue
            if index in logits:
                made.append((end, logits[index]))
            elif columns.kind == "features":
                assert self._saes is not None
                rows = self._saes.rows(index, columns, records, runs)
                out[:, end : end + columns.nbytes] = rows.view(torch.uint8)
            else:
                reads.append(_Read(index, columns, self._layers(columns.tap)))
            end += columns.nbytes
        for begin, rows in _joined(made):
            out[:, begin : begin + rows.shape[1]] = rows
        tiles = Tiles(runs, positions, self._workspace)
        for stack in self._stacks(reads, len(records)):
            rows = self._rows(stack, records, tiles).view(torch.uint8)
            nbytes = stack[0].columns.nbytes
            for first, stop in _neighbours([begins[read.nth] for read in stack], nbytes):
                begin = begins[stack[first].nth]
                part = rows[:, first * nbytes : stop * nbytes]
                out[:, begin : begin + part.shape[1]] = part
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
        """Write this rank's part of means over heads to `out`, [rows, slots], at `places`."""
        reads = []
        for index, columns in enumerate(encoding.patterns):
            if columns.slot is not None and columns.count:
                reads.append(_Read(index, columns, self._layers(columns.tap)))
            elif columns.slot is not None:
                out[:, columns.slot].index_fill_(0, places, 0.0)
        tiles = Tiles(runs, positions, self._workspace)
        for stack in self._stacks(reads, len(records)):
            rows = self._rows(stack, records, tiles).unflatten(1, (len(stack), -1))
            for read, sums in zip(stack, rows.sum(2).unbind(1), strict=True):
                assert read.columns.slot is not None
                score = sums / read.columns.divisor
                out[:, read.columns.slot].index_copy_(0, places, score)

    def _stacks(self, reads: Sequence[_Read], count: int) -> Iterator[list[_Read]]:
        """Yield rows of several layers that are computed together, to save the host time."""
        alike: dict[tuple[object, ...], list[_Read]] = {}
        for read in reads:
            alike.setdefault(read.form, []).append(read)
        for stack in alike.values():
            columns = stack[0].columns
            row_bytes = 4 * columns.count * columns.size * max(1, count)
            most = max(1, self._workspace // 4 // row_bytes)
            for first in range(0, len(stack), most):
                yield stack[first : first + most]

    def _select(self, read: _Read, device: torch.device) -> _Selected:
        """Return a row with what belongs to its heads, which is made once for each choice."""
        columns, layer = read.columns, read.layer
        if not columns.heads:
            return _Selected(read.nth, columns, layer, layer.form, layer.key_heads, None)
        key = columns.tap, columns.heads
        selection = self._chosen.get(key)
        if selection is None:
            if len(self._chosen) >= _CHOICES:
                self._chosen.clear()
            heads = _index(columns.heads, device)
            selection = layer.form.of_heads(heads), layer.key_heads[heads], heads
            self._chosen[key] = selection
        return _Selected(read.nth, columns, layer, *selection)

    def _rows(self, stack: Sequence[_Read], records: Tensor, tiles: Tiles) -> Tensor:
        """Return the rows of a stack, float32 [n, layers · heads · size]."""
        columns, layer = stack[0].columns, stack[0].layer
        table = self._block_table(layer.group)
        chosen = [self._select(read, records.device) for read in stack]
        shape = records.shape[0], len(stack), columns.count, columns.size
        out = torch.empty(shape, dtype=torch.float32, device=records.device)
        for tile in tiles.of(columns.count, layer.form.window):
            # Where only the device knows positions, the host's bounds may be beyond the last block.
            keys = min(tile.stop, table.shape[1] * layer.layout.size) - tile.begin
            shape = *tile.positions.shape, columns.count, keys
            count = tile.positions.numel()
            query_bytes = count * columns.width * records.itemsize
            most = most_cells(self._workspace, columns.count) // (count * keys)
            most = max(1, min(most, self._workspace // 4 // query_bytes))
            for first in range(0, len(stack), most):
                some = chosen[first : first + most]
                begin = min(read.columns.start for read in some)
                end = max(read.columns.start for read in some) + columns.width
                queries = records[:, begin:end][tile.at]
                scores = torch.empty((len(some), *shape), dtype=out.dtype, device=out.device)
                for read, layer_scores in zip(some, scores, strict=True):
                    at = read.columns.start - begin
                    mine = queries[:, at : at + read.columns.width]
                    self._score_keys(read, mine, tile, table, layer_scores)
                rows = _reduced(some, scores, tile).flatten(1, 2)
                out[tile.at, first : first + len(some)] = rows.transpose(0, 1)
        return out.flatten(1)

    def _score_keys(
        self, read: _Selected, queries: Tensor, tile: Tile, table: Tensor, out: Tensor
    ) -> None:
        """Write one layer's scores, [runs, rows, heads, keys]; queries: [runs · rows, numbers]."""
        columns, layer, form = read.columns, read.layer, read.form
        stop = tile.begin + out.shape[-1]
        queries = queries.view(*out.shape[:2], layer.key_heads.numel(), -1)
        if read.heads is not None:
            queries = queries[:, :, read.heads]
        queries = layer.queries(queries)
        keys = layer.all_keys()
        if queries.is_cuda and keys is not None and _kernel_reads(keys.dtype, keys.device):
            from midstream.runtime.worker.readouts.scores_kernel import scores_triton

            query = queries if keys.itemsize == 1 else queries.to(keys.dtype)
            scores_triton(
                query, tile.positions, keys, table, tile.requests, read.key_heads, tile.begin, stop,
                out, scale=form.scale, soft_cap=form.soft_cap, window=form.window,
                slopes=form.slopes,
            )  # fmt: skip
            return
        size = layer.layout.size

        def read_keys(first: int, last: int) -> Tensor:
            blocks = table[tile.requests, first // size : -(-last // size)]
            block_keys = layer.keys(blocks)
            return block_keys[:, first % size : first % size + last - first]

        per_key = len(tile.runs) * columns.count * queries.shape[-1] * 4
        step = max(size, self._workspace // 2 // per_key // size * size)
        shared = None if read.heads is None else read.key_heads
        asked = op.Queries(queries, tile.positions, shared)
        op.scores(asked, read_keys, range(tile.begin, stop, step), form, out)


@dataclass(frozen=True, slots=True)
class _Read:
    """A row of attention of one layer, by the number of its pattern."""

    nth: int
    columns: PatternColumns
    layer: AttentionLayer

    @property
    def form(self) -> tuple[object, ...]:
        """What rows have in common that are computed together."""
        columns, layer = self.columns, self.layer
        form = layer.form
        own = columns.kind, columns.size, columns.heads, columns.count, columns.width
        return *own, form.window, form.sinks is None, layer.group


@dataclass(frozen=True, slots=True)
class _Selected:
    """A `_Read` with its heads (int64; None: all), their form and their key-value heads."""

    nth: int
    columns: PatternColumns
    layer: AttentionLayer
    form: op.AttentionForm
    key_heads: Tensor
    heads: Tensor | None


def _reduced(stack: Sequence[_Selected], scores: Tensor, tile: Tile) -> Tensor:
    """Return rows [layers, runs, rows, heads, size] of scores [layers, runs, rows, heads, keys]."""
    columns, begin = stack[0].columns, tile.begin
    if columns.kind == "scores":
        return op.full(scores, begin, columns.size, -torch.inf)
    sinks = [read.form.sinks for read in stack if read.form.sinks is not None]
    weights = op.softmax(scores, torch.stack(sinks) if sinks else None)
    match columns.kind:
        case "top":
            return op.top_keys(weights, begin, columns.size // 2)
        case "mass":
            stop = begin + scores.shape[-1]
            chosen = [tile.keys_of_mass(read.nth, stop) for read in stack]
            same = all(keys is chosen[0] for keys in chosen)
            return op.mass(weights, chosen[0] if same else torch.stack(chosen))
        case "entropy":
            return op.entropy(weights)
        case "full":
            return op.full(weights, begin, columns.size)
        case other:
            raise AssertionError(other)


def _joined(made: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Yield (column, rows [n, numbers of 4 bytes]) in order; rows next to each other as one."""
    for index, (begin, rows) in enumerate(made):
        if index and made[index - 1][0] + 4 * made[index - 1][1].shape[1] == begin:
            continue
        some, end = [], begin
        for first, part in made[index:]:
            if first != end:
                break
            some.append(part)
            end += 4 * part.shape[1]
        yield begin, (rows if len(some) == 1 else torch.cat(some, 1)).view(torch.uint8)


def _neighbours(begins: Sequence[int], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of places of rows of `nbytes` bytes that lie one after the other."""
    first = 0
    for place in range(1, len(begins) + 1):
        if place == len(begins) or begins[place] != begins[place - 1] + nbytes:
            yield first, place
            first = place


@lru_cache(maxsize=8)
def _kernel_reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the Triton kernel can read keys of this format."""
    return dtype != torch.float8_e4m3fn or torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)
