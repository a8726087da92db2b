"""Doses of edits: how long the change of a token's vector is, relative to the vector before it.

A position may be computed again, as drafts are rejected and requests preempted, and the last ones
may lie beyond the request's end. So the latest positions are kept each by itself, and the others
are sums. Versions of a plan have sums of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.runtime.protocol.results import DoseSums
from midstream.runtime.protocol.runs import Floats, Ints
from midstream.runtime.worker.step.position_states import grow

_NONE = np.float32(-1)  # in place of a dose
_MOST = np.finfo(np.float32).max  # of a vector of zeros, and JSON knows no infinity
_LEAST_KEPT = 32
_AT_ONCE = 16  # steps
_MANY = 1024  # rows of a step that do not wait for others
_MORE = 8  # rows that are made at once, for later versions


def _doses_of(bits: NDArray[np.int32]) -> Floats:
    """Return doses from their bits; `_NONE` where there is none."""
    values = bits.view(np.float32)
    doses = np.where((bits > 0) & (values == values), np.minimum(values, _MOST), _NONE)
    doses[bits == layout.NO_CHANGE] = 0
    return doses


class Doses:
    """Owner of the sums of the requests in all slots."""

    def __init__(self, columns: int, drafts: int = 0, bound: float | None = None) -> None:
        self.bound = bound  # a request with a larger dose ends
        self._used = 0  # of the columns; in the others there is no dose
        # Rows of two steps with drafts may come after the end that the front end decides on.
        self._kept = max(_LEAST_KEPT, 1 << (4 * drafts).bit_length())
        self._totals = np.zeros((0, 3, columns))
        self._latest = np.zeros((0, self._kept, columns), np.float32)
        self._positions = np.zeros((0, self._kept), np.int64)  # 1 + position; 0: none
        # Earlier positions are in the sums, or were never selected.
        self._floor = np.zeros(0, np.int64)
        self._row_of = np.zeros(0, np.int64)  # of these arrays, by slot
        # Of slots whose requests have later versions: rows by number, and (first position, row).
        self._numbers: dict[int, dict[int, int]] = {}
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self._free: list[int] = []
        # (slots, positions, bits) of steps that are not in the arrays yet.
        self._waiting: list[tuple[Ints, Ints, NDArray[np.int32]]] = []

    def grow(self, slots: int) -> None:
        """Have a row for each of so many slots."""
        before = self._row_of.size
        self._row_of = grow(self._row_of, slots)
        self._row_of[before:] = self._new_rows(slots - before)

    def _new_rows(self, count: int) -> range:
        size = self._floor.size
        rows = size + count
        self._totals, self._latest = grow(self._totals, rows), grow(self._latest, rows)
        self._positions, self._floor = grow(self._positions, rows), grow(self._floor, rows)
        self._latest[size:] = _NONE
        return range(size, rows)

    def change(self, slot: int, number: int, position: int) -> None:
        """Record that a version of a request's plan holds from a position on."""
        self._settle()
        first = int(self._row_of[slot])
        numbers = self._numbers.setdefault(slot, {0: first})
        if number not in numbers:
            self._free = self._free or list(self._new_rows(_MORE))
            numbers[number] = self._free.pop()
        starts = self._versions.setdefault(slot, [(0, first)])
        while len(starts) > 1 and starts[-1][0] >= position:
            starts.pop()
        starts.append((position, numbers[number]))

    def add(self, slots: Ints, positions: Ints, bits: NDArray[np.int32]) -> None:
        """Add doses of rows of a step, [rows, columns], as the device has them."""
        self._waiting.append((slots, positions, bits.copy()))
        if len(self._waiting) >= _AT_ONCE or slots.size > _MANY:
            self._settle()

    def above(self, bits: NDArray[np.int32]) -> list[tuple[int, int, float]]:
        """Return (row, column, dose) of the largest dose of each row that is beyond the bound."""
        # Bits of numbers from 0 on are in the order of the numbers.
        if self.bound is None or bits.max() <= np.float32(self.bound).view(np.int32):
            return []
        doses = _doses_of(bits)
        columns = doses.argmax(1)
        largest = doses[np.arange(len(doses)), columns]
        rows = np.flatnonzero(largest > self.bound).tolist()
        return [(row, int(columns[row]), float(largest[row])) for row in rows]

    def _settle(self) -> None:
        """Add what waits. Steps that go on by one position each, as usual, are added together."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            slots, positions, bits = waiting[0]
            count = 1
            while (
                count < len(waiting)
                and waiting[count][0] is slots
                and waiting[count][2].shape == bits.shape
                and (waiting[count][1] == positions + count).all()
            ):
                count += 1
            self._used = max(self._used, bits.shape[1])
            doses = _doses_of(np.stack([step[2] for step in waiting[:count]]))
            if count == 1 or not self._add_steps(slots, positions, doses):
                count = 1
                self._add_runs(slots, positions, doses[0])
            del waiting[:count]

    def _add_steps(self, slots: Ints, positions: Ints, doses: Floats) -> bool:
        """Add doses [steps, slots, columns] from some positions on; False: not the usual case."""
        rows, count = self._row_of[slots], doses.shape[0]
        if self._versions or np.unique(slots).size < slots.size:
            return False
        floor, latest = self._floor[rows], self._positions[rows]
        if (positions < floor).any() or (latest > positions[:, None]).any():
            return False
        floor = np.maximum(floor, positions + count - self._kept)
        passed = (latest > 0) & (latest <= floor[:, None])
        if passed.any():
            before = self._latest[rows, :, : self._used]
            before[~passed] = _NONE
            totals, is_dose = self._totals[rows, :, : self._used], before >= 0
            totals[:, 0] += np.where(is_dose, before, 0).sum(1, dtype=np.float64)
            totals[:, 1] += is_dose.sum(1)
            totals[:, 2] = np.maximum(totals[:, 2], before.max(1))
            self._totals[rows, :, : self._used] = totals
            latest[passed] = 0
            self._positions[rows] = latest
        after = positions + np.arange(count)[:, None]
        self._put(np.broadcast_to(rows, after.shape), after, doses)
        self._floor[rows] = floor
        return True

    def _put(self, rows: Ints, positions: Ints, doses: Floats) -> None:
        """Keep the doses of the latest positions, in place of those that are in the sums."""
        place = positions % self._kept
        self._latest[rows, place, : doses.shape[-1]] = doses
        if doses.shape[-1] < self._used:
            self._latest[rows, place, doses.shape[-1] : self._used] = _NONE
        self._positions[rows, place] = positions + 1

    def _set_versions(self, rows: Ints, slots: Ints, positions: Ints) -> None:
        """Set the rows of positions of requests with later versions."""
        for index in np.flatnonzero(np.isin(slots, list(self._versions))).tolist():
            starts = self._versions[int(slots[index])]
            rows[index] = next(row for start, row in starts[::-1] if start <= positions[index])

    def _add_runs(self, slots: Ints, positions: Ints, doses: Floats) -> None:
        """Add positions of some requests, each once; those from the first on are computed anew."""
        rows = self._row_of[slots]
        if self._versions:
            self._set_versions(rows, slots, positions)
        every, of = np.unique(rows, return_inverse=True)
        first = np.full(every.size, np.iinfo(np.int64).max)
        last = np.zeros(every.size, np.int64)
        np.minimum.at(first, of, positions)
        np.maximum.at(last, of, positions)
        before = self._floor[every]
        floor = np.maximum(before, last + 1 - self._kept)
        latest = self._positions[every]
        # Those from the first position on are computed again.
        stale = latest > np.maximum(first, before)[:, None]
        passed = (latest > 0) & ~stale & (latest <= floor[:, None])
        if passed.any():
            at, place = passed.nonzero()
            self._fold(every[at], self._latest[every[at], place, : self._used])
        latest[stale | passed] = 0
        self._positions[every] = latest
        self._floor[every] = floor
        known, is_latest = positions >= before[of], positions >= floor[of]
        self._fold(rows[known & ~is_latest], doses[known & ~is_latest])
        kept = known & is_latest
        self._put(rows[kept], positions[kept], doses[kept])

    def _fold(self, rows: Ints, doses: Floats) -> None:
        """Add doses to the sums of rows, of which each may occur several times."""
        if not rows.size:
            return
        order = np.argsort(rows, kind="stable")
        rows, doses = rows[order], doses[order]
        begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        rows, columns, is_dose = rows[begins], doses.shape[1], doses >= 0
        totals = self._totals[rows, :, :columns]
        totals[:, 0] += np.add.reduceat(np.where(is_dose, doses, 0), begins, dtype=np.float64)
        totals[:, 1] += np.add.reduceat(is_dose, begins, dtype=np.float64)
        totals[:, 2] = np.maximum(totals[:, 2], np.maximum.reduceat(doses, begins))
        self._totals[rows, :, :columns] = totals

    def take(self, slots: Sequence[int]) -> list[list[DoseSums]]:
        """Return the sums of requests that have doses, and clear their slots."""
        self._settle()
        taken = []
        for slot in slots:
            first = int(self._row_of[slot])
            numbers = self._numbers.pop(slot, {0: first})
            self._versions.pop(slot, None)
            sums = [self._take_row(number, row) for number, row in numbers.items()]
            self._free += [row for row in numbers.values() if row != first]
            taken.append([doses for doses in sums if doses is not None])
        return taken

    def _take_row(self, number: int, row: int) -> DoseSums | None:
        marks, totals = self._positions[row], self._totals[row]
        if not (self._floor[row] or marks.any()):
            return None
        places = np.flatnonzero(marks)
        places = places[np.argsort(marks[places])]
        latest = self._latest[row, places]
        has = (totals[1] > 0) | (latest >= 0).any(0)
        columns = int(np.flatnonzero(has)[-1]) + 1 if has.any() else 0
        sums = DoseSums(
            number, totals[:, :columns].copy(), marks[places] - 1, latest[:, :columns].copy()
        )
        marks[:], totals[:], self._floor[row] = 0, 0, 0
        return sums
