"""Sums of reduced rows at the ends of cached blocks, for requests to which the prefix cache serves
these. They are of all selected tokens up to there, so that a request goes on from one block's.

The engine core decides who is served what and what is dropped, see `runtime.core.scored_blocks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.protocol.runs import Ints, expand
from midstream.runtime.worker.step.block_table import BlockTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.transport.base import Copy

_Place = tuple[str, int]  # a key, and the id of a block


@dataclass(frozen=True, slots=True)
class _Selected:
    """The tokens that a request's capture counts."""

    key: str
    positions: Ints  # ascending
    # The last of these in each block, but in one that the prompt or the selection ends inside.
    marks: Ints


@dataclass(slots=True)
class _Request:
    captures: dict[int, _Selected]
    reached: int = 0  # position up to which its tokens are computed by the step that is queued
    # Sums of blocks that are not filled yet, with where these end.
    early: list[tuple[int, _Place, Copy]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """Sums during their copy to the host, [places, numbers]."""

    step: int
    places: tuple[_Place, ...]
    copy: Copy


class SumCache:
    """Sums by key and block on the host, float64 [numbers] of this rank's taps."""

    def __init__(self, table: BlockTable, copy: Callable[[Tensor], Copy]) -> None:
        """Create it; `table` knows the blocks of requests, and `copy` queues a copy to the host."""
        self.is_on = False  # the engine core says what is dropped
        self._table = table
        self._copy = copy
        self._requests: dict[int, _Request] = {}
        self._sums: dict[_Place, Tensor] = {}
        self._arriving: dict[_Place, tuple[_Arrival, int]] = {}
        self._queue: deque[_Arrival] = deque()

    def __len__(self) -> int:
        """Return how many sums there are, also those that no request gets any more."""
        return len(self._sums) + len(self._arriving)

    def begin(self, slot: int, sums: Iterable[KeptScore], cached: int) -> None:
        """Note a request that is about to run, maybe again, after `cached` tokens. Its blocks are
        in the table.
        """
        request = self._requests.get(slot)
        if request is None:
            captures = {kept.slot: self._selected(kept) for kept in sums}
            request = self._requests[slot] = _Request(captures)
        request.reached = cached
        request.early.clear()
        self.renew(slot, cached)

    def _selected(self, kept: KeptScore) -> _Selected:
        positions = expand([(start, stop) for start, stop in kept.ranges if stop is not None])
        size = self._table.block_size
        blocks = positions // size
        is_last = np.append(blocks[1:] != blocks[:-1], (positions[-1] + 1) % size == 0)
        return _Selected(kept.key, positions, positions[is_last])

    def renew(self, slot: int, start: int) -> None:
        """Forget what the blocks of a request had that hold its positions from `start` on."""
        request = self._requests.get(slot)
        for block in () if request is None else self._table.blocks_from(slot, start):
            assert request is not None
            for selected in request.captures.values():
                self._forget((selected.key, block))

    def reach(self, batch: StepBatch, slot_of: Callable[[str], int | None]) -> None:
        """Note up to where a step computes each request."""
        if not self._requests:
            return
        stops = (batch.computed + batch.scheduled).tolist()
        for name, stop in zip(batch.request_ids, stops, strict=True):
            slot = slot_of(name)
            request = None if slot is None else self._requests.get(slot)
            if request is not None and stop > request.reached:
                request.reached = stop
                early, request.early = request.early, []
                for end, place, copy in early:
                    if end > stop:
                        request.early.append((end, place, copy))
                    else:
                        self._put(_Arrival(0, (place,), copy))

    def marks(self, slot: int, capture: int, start: int, stop: int) -> Ints:
        """Return the positions of [start, stop) after whose rows a capture's sums are kept."""
        request = self._requests.get(slot)
        if request is None:
            return np.zeros(0, np.int64)
        marks = request.captures[capture].marks
        return marks[np.searchsorted(marks, start) : np.searchsorted(marks, stop)]

    def write(self, slot: int, capture: int, marks: Ints, sums: Tensor, step: int) -> None:
        """Keep the sums [marks, numbers] after the rows at some of `marks`."""
        request, size = self._requests[slot], self._table.block_size
        key = request.captures[capture].key
        index = marks // size
        blocks = self._table.blocks_at(slot, index).tolist()
        places = [(key, block) for block in blocks]
        end = (int(index[-1]) + 1) * size
        if end > request.reached:
            # The engine core learns of the last block's when it is filled, if it ever is.
            request.early.append((end, places.pop(), self._copy(sums[-1:])))
        if places:
            self._put(_Arrival(step, tuple(places), self._copy(sums[: len(places)])))

    def _put(self, arrival: _Arrival) -> None:
        self._queue.append(arrival)
        for row, place in enumerate(arrival.places):
            self._forget(place)
            self._arriving[place] = arrival, row

    def read(self, slot: int, capture: int, cached: int) -> tuple[int, Tensor | None] | None:
        """Return how many of the rows before `cached` a capture counts, and their sums; None for
        the sums if there are none, and for both if these are not kept. May block.
        """
        selected = self._requests[slot].captures[capture]
        count = int(np.searchsorted(selected.positions, cached))
        if not count:
            return 0, None
        last = selected.positions[count - 1]
        marks = selected.marks
        index = int(np.searchsorted(marks, last))
        if index == marks.size or marks[index] != last:
            return None
        (block,) = self._table.blocks_at(slot, last[None] // self._table.block_size).tolist()
        place = selected.key, block
        if place in self._arriving:
            arrival, row = self._arriving[place]
            return count, arrival.copy.values()[row]
        sums = self._sums.get(place)
        return None if sums is None else (count, sums)

    def knows(self, slot: int) -> bool:
        return slot in self._requests

    def carry_out(self, step: int) -> None:
        """Store what steps up to this one have copied, all of it on the host."""
        while self._queue and self._queue[0].step <= step:
            arrival = self._queue.popleft()
            values = arrival.copy.values()
            for row, place in enumerate(arrival.places):
                if self._arriving.get(place) == (arrival, row):
                    del self._arriving[place]
                    self._sums[place] = values[row].clone()

    def drop(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """Forget sums, by key those of some blocks."""
        for key, numbers in blocks.items():
            for block in numbers:
                self._forget((key, block))

    def release(self, slot: int) -> None:
        """Forget a request that has ended."""
        self._requests.pop(slot, None)

    def _forget(self, place: _Place) -> None:
        self._sums.pop(place, None)
        self._arriving.pop(place, None)
