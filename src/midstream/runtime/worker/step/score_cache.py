"""Scores of the tokens of cached blocks, for requests to which the prefix cache serves these.

A score is kept by the place of its token's KV, so that it lives as long as the block and goes
where the block goes. The engine core decides who is served what, see `runtime.core.scored_blocks`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.vllm.kv_cache import KvBlocks
from midstream.runtime.worker.row_index import PendingPositions, known_positions
from midstream.runtime.worker.step.block_table import BlockTable
from midstream.runtime.worker.step.in_flight import PreparedStep, positions_of
from midstream.runtime.worker.step.position_states import grow
from midstream.runtime.worker.step.step_plan import TokenRuns
from midstream.transport.base import HostScores, Shipment

_DROPPED = -1
# Rows of steps that are queued until they are written together. Written alone, those of a step take
# as long as all else that a step of 256 sequences does for their scores.
_MOST_ROWS = 1 << 12


@dataclass(frozen=True, slots=True)
class _Layout:
    """Scores that requests have in common: where they are kept, and their columns in a step."""

    keys: tuple[str, ...]
    kept: Ints  # columns of the cache; `_DROPPED`: it is not kept any more
    columns: Ints
    has_scores: bool  # and not only what gates remember


@dataclass(frozen=True, slots=True, eq=False)
class _KeptRuns:
    """The runs of a step whose scores are kept; a step that repeats another one has the same."""

    of: TokenRuns  # all its runs
    changes: int  # see `ScoreCache`
    chosen: Ints
    length: Ints
    row: Ints
    slot: Ints
    layout: Ints
    layouts: tuple[int, ...]  # the different ones
    rows: int

    @staticmethod
    def make(
        runs: TokenRuns, layout: Ints, remembers: NDArray[np.bool_], changes: int
    ) -> _KeptRuns:
        """Return them, by the layout of each run and whether gates remember something of it."""
        chosen = np.flatnonzero((layout > 0) & ((runs.scored > 0) | remembers))
        length, layout = runs.length[chosen], layout[chosen]
        return _KeptRuns(
            of=runs,
            changes=changes,
            chosen=chosen,
            length=length,
            row=runs.row[chosen],
            slot=runs.slot[chosen],
            layout=layout,
            layouts=tuple(sorted(set(layout.tolist()))),
            rows=int(length.sum()),
        )


@dataclass(slots=True, eq=False)
class _Write:
    """Scores of a step's runs that are to be kept."""

    step: int
    position: Ints | PendingPositions  # of each run
    runs: _KeptRuns
    shipment: Shipment | None  # None: the step is settled
    settled: HostScores | None = None

    def scores(self) -> HostScores:
        """Return the step's scores. Blocks until they are on the host."""
        shipment = self.shipment  # another thread may settle the step meanwhile
        scores = self.settled if shipment is None else shipment.scores()
        assert scores is not None
        return scores

    def settle(self) -> None:
        """Leave the shipment, whose rows others free."""
        self.settled = self.scores()
        self.shipment = None


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
        self.blocks = BlockTable(blocks, max_model_len)
        self._num_columns = num_columns  # of a step's scores
        self._values: NDArray[np.float32] = np.zeros((0, 0), np.float32)  # [tokens, scores]
        self._column_of: dict[str, int] = {}  # of `_values`, by key
        self._free: list[int] = []
        self._layouts: dict[int, _Layout] = {}
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}  # by keys and columns
        self._layout = np.zeros(0, np.int64)  # of each slot; 0: none
        self._users: dict[int, int] = {}  # slots of each layout
        # Slots of requests of which gates remember something.
        self._remembers = np.zeros(0, np.bool_)
        self._queue: deque[_Write | CachedScores] = deque()
        self._new: list[CachedScores] = []  # of requests that begin with the next step
        self._lock = threading.Lock()
        self._recorded = self._settled = 0  # numbers of the last such steps
        self._unsettled: deque[_Write] = deque()
        self._queued = self._written = 0  # rows, since the start
        self._changes = 0  # of slots that have a layout
        self._runs: _KeptRuns | None = None  # of the last step

    def __len__(self) -> int:
        """Return how many requests' scores are kept or read."""
        return sum(self._users.values())

    def place(
        self, slot: int, scores: tuple[KeptScore, ...], blocks: Sequence[Sequence[int]], cached: int
    ) -> None:
        """Note a request that is about to run, maybe again: its blocks by group, of which the cache
        served `cached` tokens. Its earlier steps are settled.
        """
        if self.blocks.kv is None:
            return
        if self.has(slot):
            self.carry_out(self._settled)  # by its former blocks
        if slot >= self._layout.size:
            size = max(64, 2 * slot)
            self._layout = grow(self._layout, size)
            self.blocks.grow(size)
            self._remembers = grow(self._remembers, size)
        self.blocks.begin(slot, blocks)
        number = int(self._layout[slot])
        if not number:
            number = self._numbered(tuple([score for score in scores if not score.nbytes]))
            self._users[number] = self._users.get(number, 0) + 1
            self._layout[slot] = number
            self._remembers[slot] = any(score.memory for score in scores)
            self._changes += 1
        if cached and self._layouts[number].has_scores:
            self._new.append(CachedScores(self, slot, cached, number))

    def has(self, slot: int) -> bool:
        return slot < self._layout.size and bool(self._layout[slot])

    def _numbered(self, scores: tuple[KeptScore, ...]) -> int:
        content = tuple([(score.key, score.slot) for score in scores])
        number = self._numbers.get(content)
        if number is None:
            number = self._numbers[content] = max(self._layouts, default=0) + 1
            keys = tuple([key for key, _ in content])
            kept = np.array([self._column(key) for key in keys], np.int64)
            columns = np.array([column for _, column in content], np.int64)
            has_scores = not all(score.memory for score in scores)
            self._layouts[number] = _Layout(keys, kept, columns, has_scores)
        return number

    def _column(self, key: str) -> int:
        column = self._column_of.get(key)
        if column is None:
            if not self._free:
                assert self.blocks.kv is not None
                size = self._values.shape[1]
                self._values = _widened(self._values, self.blocks.kv.tokens, max(4, 2 * size))
                self._free = list(range(self._values.shape[1] - 1, size - 1, -1))
            column = self._column_of[key] = self._free.pop()
        return column

    def release(self, slots: Iterable[int]) -> None:
        """Forget requests whose steps are all settled."""
        mine = [slot for slot in slots if self.has(slot)]
        if not mine:
            return
        # Steps without a program are not settled.
        unread = [queued.step for queued in self._queue if _is_read_of(queued, mine)]
        self.carry_out(max([self._settled, *unread]))
        self._changes += 1
        for slot in mine:
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
        self.carry_out(self._recorded)
        for key in keys:
            column = self._column_of.pop(key, None)
            if column is None:
                continue
            self._free.append(column)
            for layout in self._layouts.values():
                layout.kept[[known == key for known in layout.keys]] = _DROPPED
        # Later requests with these scores are kept anew, in other rows.
        self._numbers.clear()

    def blank(self, key: str, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep NaN as a score of some tokens of each of some blocks. Every step is settled."""
        if self.blocks.kv is not None:
            self.carry_out(self._recorded)
            first = np.array(blocks, np.int64)[:, None] * self.blocks.block_size
            places = first + np.array(tokens, np.int64)
            column = self._column(key)  # which may make `_values` anew
            self._values[places, column] = np.nan

    def record(self, prepared: PreparedStep | None, shipment: Shipment | None, step: int) -> None:
        """Queue a step's scores to be kept, and then those that its new requests have."""
        if prepared is not None and shipment is not None and self._users:
            runs = self._kept_runs(prepared.plan.runs)
            if runs.rows:
                position = positions_of(prepared, runs.chosen)
                write = _Write(step, position, runs, shipment)
                self._queue.append(write)
                self._unsettled.append(write)
                self._queued += runs.rows
        self._recorded = step
        for cached in self._new:
            cached.step = step
            self._queue.append(cached)

    def _kept_runs(self, runs: TokenRuns) -> _KeptRuns:
        last = self._runs
        if last is not None and last.changes == self._changes and runs.has_rows_of(last.of):
            return last
        layout = _of_slots(self._layout, runs.slot)
        self._runs = _KeptRuns.make(runs, layout, self.remembers(runs.slot), self._changes)
        return self._runs

    def settle(self, step: int) -> None:
        """Note that the scores of steps up to one are on the host."""
        self._settled = step
        while self._unsettled and self._unsettled[0].step <= step:
            self._unsettled.popleft().settle()
        if self._queued - self._written >= _MOST_ROWS:
            self.carry_out(step)

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
        place = self.blocks.places(np.array([slot]), np.array([position]))
        values = np.zeros(self._num_columns, np.float32)
        values[columns] = self._values[place[0], kept]
        return values

    def carry_out(self, step: int) -> None:
        """Carry out what is queued, up to a step. Blocks until its scores are on the host."""
        with self._lock:
            writes: list[_Write] = []
            while self._queue and self._queue[0].step <= step:
                queued = self._queue.popleft()
                if isinstance(queued, _Write):
                    writes.append(queued)
                else:
                    self._write(writes)
                    writes = []
                    self._read(queued)
            self._write(writes)

    def _write(self, writes: Iterable[_Write]) -> None:
        # One place may be written in several steps, of one layout in their order.
        for _, alike in itertools.groupby(writes, _written_with):
            together = list(alike)
            scores = [write.scores() for write in together]
            memory, first = scores[0].memory.numpy(), [placed.first for placed in scores]
            runs = [write.runs for write in together]
            self._written += sum(of_step.rows for of_step in runs)
            position = np.concatenate([known_positions(write.position) for write in together])
            row = np.concatenate([of.row + begin for of, begin in zip(runs, first, strict=True)])
            length = np.concatenate([of_step.length for of_step in runs])
            slot = np.concatenate([of_step.slot for of_step in runs])
            layout = np.concatenate([of_step.layout for of_step in runs])
            if int(length.max()) > 1:
                within = within_runs(length)
                position = np.repeat(position, length) + within
                row = np.repeat(row, length) + within
                slot, layout = np.repeat(slot, length), np.repeat(layout, length)
            places = self.blocks.places(slot, position)
            numbers = runs[0].layouts
            for number in numbers:
                if not self._layouts[number].kept.size:
                    continue  # of a request that keeps sums alone
                kept, columns = self._kept_of(number)
                mine = slice(None) if len(numbers) == 1 else np.flatnonzero(layout == number)
                values = memory[_index(row[mine])]
                if isinstance(kept, slice):
                    self._values[places[mine], kept] = values[:, columns]
                else:
                    self._values[places[mine][:, None], kept] = values[:, columns]

    def _read(self, cached: CachedScores) -> None:
        size, width = self.blocks.block_size, self._values.shape[1]
        blocks = self.blocks.blocks_at(cached.slot, np.arange(-(-cached.length // size)))
        rows = self._values.reshape(-1, size * width)[blocks].reshape(-1, width)[: cached.length]
        kept, columns = self._kept_of(cached.layout)
        values = np.zeros((cached.length, self._num_columns), np.float32)
        values[:, columns] = rows[:, kept]
        cached.values = torch.from_numpy(values)

    def _kept_of(self, number: int) -> tuple[Ints | slice, Ints | slice]:
        """Return the columns of the cache and those of a step that a layout has, as indices."""
        layout = self._layouts[number]
        is_kept = layout.kept != _DROPPED
        return _index(layout.kept[is_kept]), _index(layout.columns[is_kept])


def _is_read_of(queued: _Write | CachedScores, slots: Container[int]) -> bool:
    return isinstance(queued, CachedScores) and queued.slot in slots


def _written_with(write: _Write) -> tuple[int, ...]:
    """Return what steps that are written together have in common: memory and only layout."""
    memory, layouts = id(write.scores().memory), write.runs.layouts
    return (memory, *layouts) if len(layouts) == 1 else (memory, *layouts, write.step)


def _of_slots(values: NDArray[Any], slot: Ints) -> NDArray[Any]:
    """Return the entries of slots; 0 where there are none yet."""
    if slot.size and int(slot.max()) < values.size:
        return values[slot]
    known = slot < values.size
    chosen = np.zeros(slot.size, values.dtype)
    chosen[known] = values[slot[known]]
    return chosen


def _widened(values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    wide = np.zeros((rows, columns), np.float32)
    if values.size:
        wide[:, : values.shape[1]] = values
    return wide


def _index(numbers: Ints) -> Ints | slice:
    """Return an index of an array's rows or columns; NumPy copies those of a slice as one."""
    first = int(numbers[0]) if numbers.size else 0
    is_range = np.array_equal(numbers, np.arange(first, first + numbers.size))
    return slice(first, first + numbers.size) if is_range else numbers
