"""Scores of the tokens of cached blocks, for requests to which the prefix cache serves these.

A score is kept by the place of its token's KV, so that it lives as long as the block and goes
where the block goes. The engine core decides who is served what, see `runtime.core.scored_blocks`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.vllm.kv_cache import KvBlocks
from midstream.runtime.worker.row_index import PendingPositions
from midstream.runtime.worker.step.in_flight import PreparedStep, positions_of
from midstream.runtime.worker.step.position_states import grow
from midstream.transport.base import HostScores, Shipment

_DROPPED = -1


@dataclass(frozen=True, slots=True)
class _Layout:
    """Scores that requests have in common: where they are kept, and their columns in a step."""

    keys: tuple[str, ...]
    kept: Ints  # rows of the cache; `_DROPPED`: it is not kept any more
    columns: Ints
    has_scores: bool  # and not only what gates remember


@dataclass(frozen=True, slots=True)
class _Write:
    """Scores of a step's runs that are to be kept; arrays have one entry per run."""

    step: int
    shipment: Shipment
    position: Ints | PendingPositions
    length: Ints
    row: Ints
    slot: Ints
    layout: Ints


@dataclass(slots=True, eq=False)
class CachedScores:
    """Scores of the tokens of a request's cached blocks, from position 0 on."""

    cache: ScoreCache
    slot: int
    length: int
    layout: int
    step: int = 0  # that with the request's first rows; scores of it may be among them
    values: Tensor | None = None  # float32 [length, slots]; None: not read yet

    def scores(self) -> HostScores:
        """Return the scores. Blocks until they are on the host."""
        if self.values is None:
            self.cache.carry_out(self.step)
        assert self.values is not None
        return HostScores(self.values, 0, self.length)


class ScoreCache:
    """Scores by place. Writes and reads are carried out in the order of steps, once a step's scores
    are on the host; one lock, as vLLM may send a step's output from a thread of its own.
    """

    def __init__(
        self, blocks: Callable[[], KvBlocks | None], num_columns: int, max_model_len: int
    ) -> None:
        """Create it; `blocks` is called once, when the KV cache is there."""
        self._find_blocks = blocks
        self._blocks: KvBlocks | None = None
        self._num_columns = num_columns  # of a step's scores
        self._max_model_len = max_model_len
        self._values: NDArray[np.float32] = np.zeros((0, 0), np.float32)  # [scores, tokens]
        self._row_of: dict[str, int] = {}  # of `_values`, by key
        self._free: list[int] = []
        self._layouts: dict[int, _Layout] = {}
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}  # by keys and columns
        self._layout = np.zeros(0, np.int64)  # of each slot; 0: none
        self._users: dict[int, int] = {}  # slots of each layout
        self._table = np.zeros((0, 0), np.int64)  # blocks of each slot
        self._known = np.zeros(0, np.int64)  # number of these
        self._remembers = np.zeros(
            0, np.bool_
        )  # slots of requests of which gates remember something
        self._queue: deque[_Write | CachedScores] = deque()
        self._new: list[CachedScores] = []  # of requests that begin with the next step
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many requests' scores are kept or read."""
        return sum(self._users.values())

    def place(
        self, slot: int, scores: tuple[KeptScore, ...], blocks: Sequence[Sequence[int]], cached: int
    ) -> None:
        """Note a request that is about to run, maybe again: its blocks by group, of which the cache
        served `cached` tokens. Its earlier steps are settled.
        """
        known = self._kv_blocks()
        if known is None:
            return
        if slot >= self._layout.size:
            size = max(64, 2 * slot)
            width = -(-self._max_model_len // known.size) + 1
            if not self._table.size:
                self._table = np.zeros((0, width), np.int64)
            self._layout = grow(self._layout, size)
            self._table = grow(self._table, size)
            self._known = grow(self._known, size)
            self._remembers = grow(self._remembers, size)
        self._known[slot] = 0
        self.extend(slot, blocks)
        number = int(self._layout[slot])
        if not number:
            number = self._numbered(tuple([score for score in scores if not score.nbytes]))
            self._users[number] = self._users.get(number, 0) + 1
            self._layout[slot] = number
            self._remembers[slot] = any(score.memory for score in scores)
        if cached and self._layouts[number].has_scores:
            self._new.append(CachedScores(self, slot, cached, number))

    def extend(self, slot: int, blocks: Sequence[Sequence[int]]) -> int:
        """Note more blocks, by group, of a request; return the first position in them."""
        assert self._blocks is not None
        mine = blocks[self._blocks.group]
        begin = int(self._known[slot])
        end = min(begin + len(mine), self._table.shape[1])
        self._table[slot, begin:end] = mine[: end - begin]
        self._known[slot] = end
        return begin * self._blocks.size

    @property
    def block_size(self) -> int:
        """Tokens of a block; once there is a request."""
        assert self._blocks is not None
        return self._blocks.size

    def blocks_from(self, slot: int, position: int) -> list[int]:
        """Return the blocks that a request has of its positions from one on."""
        first = position // self.block_size
        blocks: list[int] = self._table[slot, first : self._known[slot]].tolist()
        return blocks

    def blocks_at(self, slot: int, index: Ints) -> Ints:
        """Return some of a request's blocks, by their indices."""
        blocks: Ints = self._table[slot, index]
        return blocks

    def has(self, slot: int) -> bool:
        return slot < self._layout.size and bool(self._layout[slot])

    def _numbered(self, scores: tuple[KeptScore, ...]) -> int:
        content = tuple([(score.key, score.slot) for score in scores])
        number = self._numbers.get(content)
        if number is None:
            number = self._numbers[content] = max(self._layouts, default=0) + 1
            keys = tuple([key for key, _ in content])
            kept = np.array([self._row(key) for key in keys], np.int64)
            columns = np.array([column for _, column in content], np.int64)
            has_scores = not all(score.memory for score in scores)
            self._layouts[number] = _Layout(keys, kept, columns, has_scores)
        return number

    def _row(self, key: str) -> int:
        row = self._row_of.get(key)
        if row is None:
            assert self._blocks is not None
            if not self._free:
                size = self._values.shape[0]
                grown = max(4, 2 * size)
                if not size:
                    self._values = np.zeros((0, self._blocks.tokens), np.float32)
                self._values = grow(self._values, grown)
                self._free = list(range(grown - 1, size - 1, -1))
            row = self._row_of[key] = self._free.pop()
        return row

    def release(self, slots: Iterable[int]) -> None:
        """Forget requests whose steps are all settled."""
        for slot in slots:
            if not self.has(slot):
                continue
            unread = [queued.step for queued in self._queue if _is_read_of(queued, slot)]
            if unread:  # its only steps had no program
                self.carry_out(max(unread))
            number = int(self._layout[slot])
            self._layout[slot] = 0
            self._remembers[slot] = False
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number], self._layouts[number]
                self._numbers = {
                    content: known for content, known in self._numbers.items() if known != number
                }

    def drop(self, keys: Iterable[str]) -> None:
        """Keep some scores no longer. Every step is settled."""
        for key in keys:
            row = self._row_of.pop(key, None)
            if row is None:
                continue
            self._free.append(row)
            for layout in self._layouts.values():
                layout.kept[[known == key for known in layout.keys]] = _DROPPED
        # Later requests with these scores are kept anew, in other rows.
        self._numbers.clear()

    def blank(self, key: str, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep NaN as a score of some tokens of each of some blocks. Every step is settled."""
        known = self._kv_blocks()
        if known is not None:
            places = np.array(blocks, np.int64)[:, None] * known.size + np.array(tokens, np.int64)
            row = self._row(key)  # which may make `_values` anew
            self._values[row, places] = np.nan

    def _kv_blocks(self) -> KvBlocks | None:
        if self._blocks is None:
            self._blocks = self._find_blocks()
        return self._blocks

    def record(self, prepared: PreparedStep | None, shipment: Shipment | None, step: int) -> None:
        """Queue a step's scores to be kept, and then those that its new requests have."""
        if prepared is not None and shipment is not None and self._users:
            runs = prepared.plan.runs
            layout = _of_slots(self._layout, runs.slot)
            chosen = np.flatnonzero((layout > 0) & ((runs.scored > 0) | self.remembers(runs.slot)))
            if chosen.size:
                position = positions_of(prepared, chosen)
                columns = runs.length[chosen], runs.row[chosen], runs.slot[chosen], layout[chosen]
                self._queue.append(_Write(step, shipment, position, *columns))
        for cached in self._new:
            cached.step = step
            self._queue.append(cached)

    def take_new(self) -> list[CachedScores]:
        """Return, once, what the requests have that began with the last recorded step."""
        new, self._new = self._new, []
        return new

    def remembers(self, slot: Ints) -> NDArray[np.bool_]:
        """Return of which requests what gates remember is kept."""
        return _of_slots(self._remembers, slot)

    def values_at(self, slot: int, position: int, step: int) -> NDArray[np.float32]:
        """Return what is kept of a request's token, by column. Blocks until a step is on the host,
        up to which it may have been computed.
        """
        self.carry_out(step)
        kept, columns = self._kept_of(int(self._layout[slot]))
        values = np.zeros(self._num_columns, np.float32)
        values[columns] = self._values[kept, self._places(np.array([slot]), np.array([position]))]
        return values

    def carry_out(self, step: int) -> None:
        """Carry out what is queued, up to a step. Blocks until its scores are on the host."""
        with self._lock:
            while self._queue and self._queue[0].step <= step:
                queued = self._queue.popleft()
                if isinstance(queued, _Write):
                    self._write(queued)
                else:
                    self._read(queued)

    def _write(self, queued: _Write) -> None:
        values = queued.shipment.scores().values.numpy()
        position, row, slot, layout = queued.position, queued.row, queued.slot, queued.layout
        if isinstance(position, PendingPositions):
            position = position.values()
        length = queued.length
        if int(length.max()) > 1:
            within = within_runs(length)
            position = np.repeat(position, length) + within
            row = np.repeat(row, length) + within
            slot, layout = np.repeat(slot, length), np.repeat(layout, length)
        places = self._places(slot, position)
        numbers = np.unique(layout).tolist()
        for number in numbers:
            kept, columns = self._kept_of(number)
            if not kept.size:
                continue
            mine = slice(None) if len(numbers) == 1 else np.flatnonzero(layout == number)
            self._values[kept[:, None], places[mine]] = values[row[mine]][:, columns].T

    def _read(self, cached: CachedScores) -> None:
        position = np.arange(cached.length)
        places = self._places(np.full(cached.length, cached.slot), position)
        kept, columns = self._kept_of(cached.layout)
        values = np.zeros((cached.length, self._num_columns), np.float32)
        for row, column in zip(kept.tolist(), columns.tolist(), strict=True):
            values[:, column] = self._values[row].take(places)
        cached.values = torch.from_numpy(values)

    def _kept_of(self, number: int) -> tuple[Ints, Ints]:
        layout = self._layouts[number]
        is_kept = layout.kept != _DROPPED
        return layout.kept[is_kept], layout.columns[is_kept]

    def _places(self, slot: Ints, position: Ints) -> Ints:
        """Return where the scores of tokens are, by the place of their KV."""
        assert self._blocks is not None
        size = self._blocks.size
        # Draft tokens beyond the last position have no block.
        block = np.minimum(position // size, self._table.shape[1] - 1)
        places: Ints = self._table[slot, block] * size + position % size
        return places


def _of_slots(values: NDArray[Any], slot: Ints) -> NDArray[Any]:
    """Return the entries of slots; 0 where there are none yet."""
    if slot.size and int(slot.max()) < values.size:
        return values[slot]
    known = slot < values.size
    chosen = np.zeros(slot.size, values.dtype)
    chosen[known] = values[slot[known]]
    return chosen


def _is_read_of(queued: _Write | CachedScores, slot: int) -> bool:
    return isinstance(queued, CachedScores) and queued.slot == slot
