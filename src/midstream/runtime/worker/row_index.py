"""Index of captured rows: which rows of which request are in which step's results.

A step only adds its arrays. Rows are sorted by request when they are taken, for many requests at
once. So neither has a Python loop over rows, requests or layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.protocol.segments import FOREVER
from midstream.runtime.worker.row_block import R, RecordRun, RowBlock
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Copy, Shipment

_Kind = tuple[tuple[int, ...], int, int]  # taps, number of the encoding, rows of a record


@dataclass(frozen=True, slots=True)
class Scores:
    """A step's scores as rows, one for each token of the step."""

    shipment: Shipment

    def rows(self) -> Tensor:
        return self.shipment.scores()

    def free(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ArenaRows:
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
    """Positions of some rows of a step that are being copied from the device.

    Attributes:
        copy: copy of the position of each row of the step.
        row: the rows.
    """

    copy: Copy
    row: Ints

    def __getitem__(self, mask: NDArray[np.bool_]) -> PendingPositions:
        return PendingPositions(self.copy, self.row[mask])

    def values(self) -> Ints:
        """Return the positions. Blocks until they are on the host."""
        return self.copy.values().numpy()[self.row].astype(np.int64)


@dataclass(frozen=True, slots=True)
class StepRecord(Generic[R]):
    """The records of one step, as runs of consecutive records.

    Attributes:
        number: number of the step in the index; later steps have greater numbers.
        source: the rows.
        serial: serial number of each run's request.
        position: position of each run's first record.
        length: number of records of each run.
        first: row of the source at which each run's first record begins.
        kind: kind of each run's records, from `CapturedRowIndex.kind`.
    """

    number: int
    source: R
    serial: Ints
    position: Ints | PendingPositions
    length: Ints
    first: Ints
    kind: Ints

    def only(self, mask: NDArray[np.bool_]) -> StepRecord[R]:
        """Return the record with the masked runs only."""
        return StepRecord(
            self.number,
            self.source,
            self.serial[mask],
            self.position[mask],
            self.length[mask],
            self.first[mask],
            self.kind[mask],
        )

    @property
    def known(self) -> Ints:
        """Position of each run's first record. Blocks until it is on the host."""
        return (
            self.position.values() if isinstance(self.position, PendingPositions) else self.position
        )

    def within(self, start: Ints | int, stop: Ints | int, width: Ints | int) -> StepRecord[R]:
        """Return the record with its runs cut to positions [start, stop).

        Args:
            start: first position; of each run, or of all.
            stop: last position + 1; likewise.
            width: rows of one record; likewise.
        """
        position = self.known
        begin = np.maximum(position, start)
        length = np.minimum(position + self.length, stop) - begin
        first = self.first + (begin - position) * width
        cut = StepRecord(self.number, self.source, self.serial, begin, length, first, self.kind)
        return cut.only(length > 0)

    def joined(self, other: StepRecord[R]) -> StepRecord[R]:
        """Return the record with other runs of the same step. Blocks until the positions of both
        are on the host.
        """
        if not other.serial.size or not self.serial.size:
            return self if self.serial.size else other
        pairs = (
            (self.serial, other.serial),
            (self.known, other.known),
            (self.length, other.length),
            (self.first, other.first),
            (self.kind, other.kind),
        )
        return StepRecord(self.number, self.source, *(np.concatenate(pair) for pair in pairs))


class CapturedRowIndex(Generic[R]):
    """Owner of the rows of steps until the last row of each is taken."""

    def __init__(self) -> None:
        self._steps: list[StepRecord[R]] = []
        self._kinds: dict[_Kind, int] = {}
        self._keys: list[_Kind] = []
        self._taken: list[R] = []
        self._next_step = 0

    def kind(self, taps: tuple[int, ...], codec: int = 0, rows: int | None = None) -> int:
        """Return the number of a kind of record.

        Args:
            taps: its taps, in order.
            codec: number of its encoding.
            rows: its number of rows; None: one for each tap.
        """
        key = (taps, codec, len(taps) if rows is None else rows)
        if key not in self._kinds:
            self._kinds[key] = len(self._keys)
            self._keys.append(key)
        return self._kinds[key]

    def __len__(self) -> int:
        """Return the number of steps that have rows left."""
        return len(self._steps)

    def record(
        self,
        source: R,
        serial: Ints,
        position: Ints | PendingPositions,
        length: Ints,
        first: Ints,
        kind: Ints,
    ) -> None:
        """Add the runs of captured rows of a step.

        Args:
            source: the rows.
            serial: int64 [runs], serial number of each run's request.
            position: int64 [runs], position of each run's first record.
            length: int64 [runs], number of records of each run.
            first: int64 [runs], row of `source` at which each run's first record begins.
            kind: int64 [runs], kind of each run's records.
        """
        if serial.size:
            self._steps.append(
                StepRecord(self._next_step, source, serial, position, length, first, kind)
            )
            self._next_step += 1

    @property
    def next_step(self) -> int:
        """Number of the next step that is recorded."""
        return self._next_step

    def take(self, serials: list[int]) -> dict[int, list[RowBlock[R]]]:
        """Remove all rows of some requests and return them; they stay valid until `free_taken`.

        A position that was computed twice, for example for a draft token that was rejected, is
        returned once, with its latest row.

        Args:
            serials: serial numbers of the requests.

        Returns:
            The blocks of each request, by serial number.
        """
        wanted = set(serials)
        chosen: list[StepRecord[R]] = []
        kept: list[StepRecord[R]] = []
        for entry in self._steps:
            mine = entry.serial.tolist()
            if wanted.issuperset(mine):
                chosen.append(entry)
                self._taken.append(entry.source)
                continue
            if not wanted.isdisjoint(mine):
                mask = np.array([serial in wanted for serial in mine], np.bool_)
                chosen.append(entry.only(mask))
                entry = entry.only(~mask)
            kept.append(entry)
        self._steps = kept
        return self._blocks(chosen, serials)

    def take_until(
        self, stops: Mapping[int, int], oldest: int
    ) -> tuple[dict[int, list[RowBlock[R]]], int]:
        """Remove the rows of some requests before a position and return them, as `take` does.

        Args:
            stops: the position, by serial number of the request.
            oldest: number of a step before which these requests have no rows.

        Returns:
            The blocks of each request, by serial number; and the number of a step before which
            these requests have no rows left.
        """
        serials = np.array(sorted(stops), np.int64)
        bounds = np.array([stops[serial] for serial in serials.tolist()], np.int64)
        widths = np.array([rows for _, _, rows in self._keys], np.int64)
        begin = bisect_left(self._steps, oldest, key=lambda entry: entry.number)
        entries = self._steps[begin:]
        del self._steps[begin:]
        chosen: list[StepRecord[R]] = []
        remains = self._next_step
        for entry in entries:
            mask = _among(entry.serial, serials)
            if not mask.any():
                self._steps.append(entry)
                continue
            mine = entry.only(mask)
            stop, width = bounds[np.searchsorted(serials, mine.serial)], widths[mine.kind]
            taken, rest = mine.within(0, stop, width), mine.within(stop, FOREVER, width)
            if rest.serial.size:
                remains = min(remains, entry.number)
            if taken.serial.size:
                chosen.append(taken)
                entry = entry.only(~mask).joined(rest)
            if entry.serial.size:
                self._steps.append(entry)
            else:
                self._taken.append(entry.source)
        return self._blocks(chosen, list(stops)), remains

    def _blocks(
        self, chosen: list[StepRecord[R]], serials: list[int]
    ) -> dict[int, list[RowBlock[R]]]:
        found: dict[int, list[RowBlock[R]]] = {serial: [] for serial in serials}
        if len(chosen) == 1 and self._add_single(chosen[0], found):
            return found
        present = {kind for entry in chosen for kind in set(entry.kind.tolist())}
        for kind in sorted(present):
            for serial, block in _blocks_of_kind(chosen, self._keys[kind], kind):
                found[serial].append(block)
        return found

    def _add_single(self, entry: StepRecord[R], found: dict[int, list[RowBlock[R]]]) -> bool:
        """Add the blocks of one step, as of requests that ended with their prompts, without the
        sorting of several steps; return whether that was possible: each request has one run there.
        """
        serials = entry.serial.tolist()
        if len(set(serials)) < len(serials):
            return False
        sources = [entry.source]
        columns = entry.known.tolist(), entry.length.tolist(), entry.first.tolist()
        for serial, kind, position, length, first in zip(
            serials, entry.kind.tolist(), *columns, strict=True
        ):
            run = RecordRun(position, length, 0, first)
            taps, codec, rows = self._keys[kind]
            found[serial].append(RowBlock(taps, codec, rows, sources, [run]))
        return True

    def free_taken(self) -> None:
        """Free the rows of steps that have no rows left in the index."""
        taken, self._taken = self._taken, []
        for source in taken:
            source.free()

    def read(
        self, taps: tuple[int, ...], spans: Mapping[int, tuple[int, int]], count: int
    ) -> dict[int, RowBlock[R]]:
        """Return raw rows of some requests, which stay in the index. Blocks for those rows only.

        Args:
            taps: the taps of the records.
            spans: [start, stop) of the positions, by serial number of the request.
            count: number of rows to expect over all requests; older steps are searched only until
                that many are found.
        """
        key = (taps, 0, len(taps))
        kind = self._kinds.get(key)
        if kind is None or not count:
            return {}
        serials = np.array(sorted(spans), np.int64)
        bounds = np.array([spans[serial] for serial in serials.tolist()], np.int64)
        chosen: list[StepRecord[R]] = []
        blocks: dict[int, RowBlock[R]] = {}
        found = 0
        for entry in reversed(self._steps):
            mine = entry.only((entry.kind == kind) & _among(entry.serial, serials))
            of = np.searchsorted(serials, mine.serial)
            mine = mine.within(bounds[of, 0], bounds[of, 1], len(taps))
            if mine.serial.size:
                chosen.insert(0, mine)
                found += int(mine.length.sum())
            if found >= count:
                # A position that was computed twice is in two steps and counts once.
                blocks = dict(_blocks_of_kind(chosen, key, kind))
                found = sum(block.size for block in blocks.values())
                if found >= count:
                    return blocks
        return dict(_blocks_of_kind(chosen, key, kind))


def _among(values: Ints, wanted: Ints) -> NDArray[np.bool_]:
    """Return which values are among some, which ascend. `np.isin` takes several times as long."""
    if not wanted.size:
        return np.zeros(values.size, np.bool_)
    found: NDArray[np.bool_] = wanted.take(wanted.searchsorted(values), mode="clip") == values
    return found


def _blocks_of_kind(
    chosen: list[StepRecord[R]], key: _Kind, kind: int
) -> list[tuple[int, RowBlock[R]]]:
    """Return the blocks of one kind, each with the serial number of its request."""
    if not chosen:
        return []
    taps, codec, rows = key
    parts = []
    for nth, entry in enumerate(chosen):
        known = entry.known
        columns = entry.serial, known, entry.length, np.full(known.size, nth), entry.first
        mine = entry.kind == kind
        parts.append(np.array(columns) if mine.all() else np.array(columns)[:, mine])
    table = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    table = _in_order(table, rows)
    sources = [entry.source for entry in chosen]
    found: list[tuple[int, RowBlock[R]]] = []
    last = -1
    for serial, *run in table.T.tolist():
        if serial != last:
            found.append((serial, RowBlock(taps, codec, rows, sources, [])))
            last = serial
        found[-1][1].runs.append(RecordRun(*run))
    return found


def _in_order(table: Ints, rows: int) -> Ints:
    """Return runs by request and position, of records at the same position only the latest.

    Args:
        table: int64 [5, runs]: serial, position, length, source and first of each run, in the order
            in which they were recorded.
        rows: rows of a record.
    """
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
    """Return runs of one record each, in order: of the records at one position of a request only
    the latest; see `_in_order`.
    """
    length = table[2]
    within = within_runs(length)
    serial, position, _, source, first = np.repeat(table, length, axis=1)
    position, first = position + within, first + within * rows
    order = np.lexsort((source, position, serial))
    serial, position, source, first = serial[order], position[order], source[order], first[order]
    last = np.append((serial[1:] != serial[:-1]) | (position[1:] != position[:-1]), True)
    ones = np.ones(int(last.sum()), np.int64)
    return np.array((serial[last], position[last], ones, source[last], first[last]))
