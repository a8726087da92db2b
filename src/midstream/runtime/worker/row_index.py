"""Index of captured rows: runs of all steps are columns of a table, sorted when taken."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.worker.row_block import R, RecordRun, RowBlock
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Copy, HostScores, Shipment

Pairs = tuple[Ints, Ints]
_Kind = tuple[tuple[int, ...], int, int]  # taps, number of the encoding, rows of a record
# Rows of the table. In place of a position that is not known yet: -1 - its row in the step's copy.
_SERIAL, _POSITION, _LENGTH, _STEP, _FIRST, _KIND = range(6)
_GONE = -1  # serial number of a run that was taken
_COLUMNS = 1024  # of a table without runs
_record_run = functools.partial(tuple.__new__, RecordRun)  # which takes a fifth of the time
_FEW = 8  # fewer serial numbers are compared with the table one by one


class HasScores(Protocol):
    """Scores, one row for each token."""

    def scores(self) -> HostScores:
        """Return the scores on the host. Blocks."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A step's scores as rows, one for each token of the step."""

    source: HasScores

    def rows(self) -> Tensor:
        return self.source.scores().values

    def free(self) -> None:
        pass


class ScoreRows(NamedTuple):
    """Scores of one request, by ascending position."""

    spans: list[tuple[int, int]]  # the positions as (first, length), adjacent ones as one
    values: NDArray[np.float32]  # a copy, [positions, slots]


class ArenaRows(NamedTuple):
    """A step's encoded rows in the arena, uint8 [rows, row_bytes]."""

    shipment: Shipment
    extent: Extent
    row_bytes: int
    arena: Arena

    def rows(self) -> Tensor:
        self.shipment.wait()
        return self.extent.memory.view(-1, self.row_bytes)

    def free(self) -> None:
        # Their copy may still be under way; it would overwrite later rows in this memory.
        self.shipment.wait()
        self.arena.release([self.extent.segment])


@dataclass(frozen=True, slots=True)
class PendingPositions:
    """Positions of some rows of a step; `copy` brings those of all its rows from the device."""

    copy: Copy
    row: Ints

    def values(self) -> Ints:
        """Return the positions. Blocks until they are on the host."""
        return self.copy.values().numpy()[self.row].astype(np.int64)


def known_positions(positions: Ints | PendingPositions) -> Ints:
    """Return positions. Blocks until they are on the host."""
    return positions.values() if isinstance(positions, PendingPositions) else positions


@dataclass(slots=True)
class _Step(Generic[R]):
    """A step that has runs left: its rows, their number, and where pending positions come from."""

    source: R
    runs: int
    positions: Copy | None


class _Runs(NamedTuple, Generic[R]):
    """Columns of the table with known positions, whose steps are indices of `sources`."""

    table: Ints
    sources: list[R]


class CapturedRowIndex(Generic[R]):
    """Owner of the rows of steps until the last row of each is taken."""

    def __init__(self) -> None:
        # Later steps have columns further right. Those of `_GONE` are removed when there is no
        # room for more, or most are.
        self._table: Ints = np.empty((6, _COLUMNS), np.int64)
        self._end = 0
        self._left = 0  # runs that were not taken
        self._steps: dict[int, _Step[R]] = {}
        self._kinds: dict[_Kind, int] = {}
        self._keys: list[_Kind] = []
        self._taken: list[R] = []
        self._next_step = 0

    def kind(self, taps: tuple[int, ...], codec: int = 0, rows: int | None = None) -> int:
        """Return the number of a kind of record; `rows` is None for one row for each tap."""
        key = (taps, codec, len(taps) if rows is None else rows)
        if key not in self._kinds:
            self._keys.append(key)
        return self._kinds.setdefault(key, len(self._keys) - 1)

    def __len__(self) -> int:
        return len(self._steps)

    def record(
        self,
        source: R,
        serial: Ints,
        position: Ints | PendingPositions,
        length: Ints,
        first: Ints,
        kind: Ints | int,
    ) -> None:
        """Add a step's runs: int64 [runs], `first` the row of `source` where each one begins, and
        `kind` that of each or of all.
        """
        if not serial.size:
            return
        table, copy = self._add(serial.size), None
        if isinstance(position, PendingPositions):
            copy, position = position.copy, -1 - position.row
        table[_SERIAL] = serial
        table[_POSITION] = position
        table[_LENGTH] = length
        table[_STEP] = self._next_step
        table[_FIRST] = first
        table[_KIND] = kind
        self._steps[self._next_step] = _Step(source, serial.size, copy)
        self._next_step += 1

    def _add(self, wanted: int) -> Ints:
        size, needed = self._table.shape[1], self._left + wanted
        if self._end + wanted > size or size > max(8 * needed, _COLUMNS):
            is_left = self._table[_SERIAL, : self._end] != _GONE
            left = self._table[:, : self._end].compress(is_left, axis=1)
            # Twice as many, so that runs are seldom moved; not many more, as all are searched.
            self._table = np.empty((6, max(2 * needed, _COLUMNS)), np.int64)
            self._table[:, : self._left] = left
            self._end = self._left
        self._end += wanted
        self._left = needed
        return self._table[:, self._end - wanted : self._end]

    @property
    def next_step(self) -> int:
        """Number of the next step that is recorded."""
        return self._next_step

    def take(self, serials: list[int]) -> dict[int, list[RowBlock[R]]]:
        """Remove requests' rows, the latest of each position; valid until `free_taken`."""
        columns = self._columns(np.array(sorted(serials), np.int64))
        if not columns.size:  # as with edits alone, while others capture
            return {serial: [] for serial in serials}
        runs = self._runs(self._known(columns))
        self._remove(columns)
        return self._blocks(runs, serials)

    def take_until(
        self, stops: Mapping[int, int], oldest: int
    ) -> tuple[dict[int, list[RowBlock[R]]], int]:
        """Remove rows before positions, searched from a step on; return them and a later step."""
        serials = np.array(sorted(stops), np.int64)
        bounds = np.array([stops[serial] for serial in serials.tolist()], np.int64)
        widths = np.array([rows for _, _, rows in self._keys], np.int64)
        begin = int(self._table[_STEP, : self._end].searchsorted(oldest))
        columns = self._columns(serials, begin)
        table = self._known(columns)
        stop = bounds[serials.searchsorted(table[_SERIAL])]
        taken = np.clip(stop - table[_POSITION], 0, table[_LENGTH])
        rest = table.copy()
        rest[_POSITION] += taken
        rest[_LENGTH] -= taken
        rest[_FIRST] += taken * widths[table[_KIND]]
        self._table[:, columns] = rest
        table[_LENGTH] = taken
        runs = self._runs(table[:, taken > 0])
        has_rest = rest[_LENGTH] > 0
        self._remove(columns[~has_rest])
        remains = rest[_STEP, has_rest].min(initial=self._next_step)
        return self._blocks(runs, list(stops)), int(remains)

    def free_taken(self) -> None:
        """Free the rows of steps that have no rows left in the index."""
        taken, self._taken = self._taken, []
        for source in taken:
            source.free()

    def _columns(self, serials: Ints, begin: int = 0) -> Ints:
        """Return the columns with the runs of some requests, from a column on."""
        column_serials = self._table[_SERIAL, begin : self._end]
        if serials.size > _FEW:
            mask = _among(column_serials, serials)
        else:
            mask = np.zeros(column_serials.size, np.bool_)
            for serial in serials.tolist():
                mask |= column_serials == serial
        return np.flatnonzero(mask) + begin

    def _known(self, columns: Ints) -> Ints:
        """Return a copy of some columns. Blocks until their positions are on the host."""
        table = self._table[:, columns]
        pending = np.flatnonzero(table[_POSITION] < 0)
        if pending.size:
            steps, begins = np.unique(table[_STEP, pending], return_index=True)
            for step, mine in zip(steps.tolist(), np.split(pending, begins[1:]), strict=True):
                copy = self._steps[step].positions
                assert copy is not None
                table[_POSITION, mine] = copy.values().numpy()[-1 - table[_POSITION, mine]]
            self._table[:, columns] = table
        return table

    def _runs(self, table: Ints) -> _Runs[R]:
        steps, table[_STEP] = np.unique(table[_STEP], return_inverse=True)
        return _Runs(table, [self._steps[step].source for step in steps.tolist()])

    def _remove(self, columns: Ints) -> None:
        self._table[_SERIAL, columns] = _GONE
        self._left -= columns.size
        steps, counts = np.unique(self._table[_STEP, columns], return_counts=True)
        for number, count in zip(steps.tolist(), counts.tolist(), strict=True):
            step = self._steps[number]
            step.runs -= count
            if not step.runs:
                self._taken.append(self._steps.pop(number).source)
        if not self._steps:
            self._end = 0

    def _blocks(self, runs: _Runs[R], serials: list[int]) -> dict[int, list[RowBlock[R]]]:
        blocks: dict[int, list[RowBlock[R]]] = {serial: [] for serial in serials}
        if len(runs.sources) == 1 and self._add_single(runs, blocks):
            return blocks
        for kind in np.unique(runs.table[_KIND]).tolist():
            for serial, block in _blocks_of_kind(runs, self._keys[kind], kind):
                blocks[serial].append(block)
        return blocks

    def _add_single(self, runs: _Runs[R], blocks: dict[int, list[RowBlock[R]]]) -> bool:
        """Add blocks of one step without sorting, if each request has one run there."""
        serials = runs.table[_SERIAL].tolist()
        if len(set(serials)) < len(serials):
            return False
        for serial, position, length, _, first, kind in runs.table.T.tolist():
            taps, codec, rows = self._keys[kind]
            record_runs = [RecordRun(position, length, 0, first)]
            blocks[serial].append(RowBlock(taps, codec, rows, runs.sources, record_runs))
        return True


class ScoreIndex(CapturedRowIndex[Scores]):
    """Owner of the scores of steps until those of each request are taken."""

    def add(
        self, source: HasScores, serial: Ints, position: Ints | PendingPositions, runs: Pairs
    ) -> None:
        """Add a step's runs of scores, of which `runs` are the lengths and first rows."""
        length, first = runs
        self.record(Scores(source), serial, position, length, first, self.kind((0,)))

    def take_scores(self, serials: list[int]) -> dict[int, ScoreRows]:
        """Remove requests' scores, the latest of each position; a request without has none."""
        columns = self._columns(np.array(sorted(serials), np.int64))
        if not columns.size:
            return {}
        scores = _gathered(self._runs(self._known(columns)))
        self._remove(columns)
        self.free_taken()
        return scores

    def read(self, spans: Mapping[int, tuple[int, int]], count: int) -> dict[int, ScoreRows]:
        """Return scores of requests at positions [start, stop), by serial number; they stay.
        Older steps are searched until `count` scores are found in all.
        """
        if not count:
            return {}
        serials = np.array(sorted(spans), np.int64)
        bounds = np.array([spans[serial] for serial in serials.tolist()], np.int64)
        searched = 0
        while True:
            searched = 4 * max(searched, count)
            begin = max(self._end - searched, 0)
            table = self._known(self._columns(serials, begin))
            of = serials.searchsorted(table[_SERIAL])
            cut = np.maximum(bounds[of, 0] - table[_POSITION], 0)
            stop = np.minimum(table[_POSITION] + table[_LENGTH], bounds[of, 1])
            table[_POSITION] += cut
            table[_LENGTH] = stop - table[_POSITION]
            table[_FIRST] += cut
            scores = _gathered(self._runs(table[:, table[_LENGTH] > 0]))
            # A position that was computed twice is in two steps and counts once.
            if not begin or sum(len(read.values) for read in scores.values()) >= count:
                return scores


def _among(values: Ints, wanted: Ints) -> NDArray[np.bool_]:
    """Return which values are among some, which ascend. `np.isin` takes several times as long."""
    if not wanted.size:
        return np.zeros(values.size, np.bool_)
    mask: NDArray[np.bool_] = wanted.take(wanted.searchsorted(values), mode="clip") == values
    return mask


def _blocks_of_kind(runs: _Runs[R], key: _Kind, kind: int) -> list[tuple[int, RowBlock[R]]]:
    taps, codec, rows = key
    mine = runs.table[_KIND] == kind
    if not mine.any():
        return []
    table = runs.table[:_KIND] if mine.all() else runs.table[:_KIND, mine]
    serial, *columns = _in_order(table, rows)
    records = list(map(_record_run, np.array(columns).T.tolist()))
    begins = np.flatnonzero(np.diff(serial, prepend=_GONE)).tolist()
    return [
        (request, RowBlock(taps, codec, rows, runs.sources, records[begin:end]))
        for request, begin, end in zip(
            serial[begins].tolist(), begins, [*begins[1:], len(records)], strict=True
        )
    ]


def _in_order(table: Ints, rows: int) -> Ints:
    """Return runs [5, runs] by request and position, of records at one position only the latest."""
    ordered = table[:, np.lexsort((table[3], table[1], table[0]))]
    serial, position, length, source, first = ordered
    follows = (serial[1:] == serial[:-1]) & (position[1:] <= (position + length)[:-1])
    if (follows & (position[1:] < (position + length)[:-1])).any():
        ordered = _latest(table, rows)
        serial, position, length, source, first = ordered
        follows = (serial[1:] == serial[:-1]) & (position[1:] == (position + length)[:-1])
    # Runs that continue the run before in the same source are one run.
    follows &= (source[1:] == source[:-1]) & (first[1:] == (first + length * rows)[:-1])
    if follows.any():
        begin = np.append(0, np.flatnonzero(~follows) + 1)
        length = np.add.reduceat(length, begin)
        ordered = np.array((serial[begin], position[begin], length, source[begin], first[begin]))
    return ordered


def _latest(table: Ints, rows: int) -> Ints:
    """Return runs of one record each, in order, at each position of a request only the latest."""
    length = table[2]
    within = within_runs(length)
    serial, position, _, source, first = np.repeat(table, length, axis=1)
    position, first = position + within, first + within * rows
    order = np.lexsort((source, position, serial))
    serial, position, source, first = serial[order], position[order], source[order], first[order]
    last = np.append((serial[1:] != serial[:-1]) | (position[1:] != position[:-1]), True)
    ones = np.ones(int(last.sum()), np.int64)
    return np.array((serial[last], position[last], ones, source[last], first[last]))


def _rows(first: Ints, length: Ints) -> Ints | slice:
    """Return an index of the rows of runs; NumPy copies those of a slice as one."""
    if first.size == 1:
        return slice(int(first[0]), int(first[0] + length[0]))
    return np.repeat(first, length) + within_runs(length)


def _gathered(runs: _Runs[Scores]) -> dict[int, ScoreRows]:
    """Return a copy of the scores of some runs, by serial number."""
    if not runs.table.size:
        return {}
    serial, position, length, source, first = _in_order(runs.table[:_KIND], 1)
    placed = [scores.source.scores() for scores in runs.sources]
    memories = list({id(place.memory): place.memory for place in placed}.values())
    ids = [id(memory) for memory in memories]
    memory_of = np.array([ids.index(id(place.memory)) for place in placed])
    first = first + np.array([place.first for place in placed])[source]
    begin, memory = np.cumsum(length) - length, memory_of[source]
    values = np.empty((int(length.sum()), memories[0].shape[1]), np.float32)
    for number, scores in enumerate(memories):
        mine = np.flatnonzero(memory == number)
        place, of = _rows(begin[mine], length[mine]), _rows(first[mine], length[mine])
        values[place] = scores.numpy()[of]
    ends = position + length
    is_new = serial[1:] != serial[:-1]
    spans = np.flatnonzero(np.append(True, is_new | (position[1:] != ends[:-1])))
    lasts = np.append(spans[1:], position.size) - 1
    joined = np.array((position[spans], ends[lasts] - position[spans])).T.tolist()
    requests = np.flatnonzero(np.append(True, is_new))
    rows = begin[requests].tolist()
    begins = spans.searchsorted(requests).tolist()
    return {
        request: ScoreRows(
            [(start, size) for start, size in joined[begin:end]], values[row_begin:row_end]
        )
        for request, begin, end, row_begin, row_end in zip(
            serial[requests].tolist(),
            begins,
            [*begins[1:], len(joined)],
            rows,
            [*rows[1:], values.shape[0]],
            strict=True,
        )
    }
