"""Sums of captured rows on the device, queued on the current stream: what rows are reduced to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from midstream.errors import NoRoomError
from midstream.plan.readouts.reduced import SUMS
from midstream.plan.resolved import REDUCING
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding

_WORKSPACE = 32 << 20  # bytes that the rows of one request may take as float64 at a time


@dataclass(slots=True, eq=False)
class _Sums:
    kind: str
    width: int  # numbers of the vectors of all taps on this rank
    # Rows of the table by sum; of `moments` the first row counted, and sums of differences from it.
    places: tuple[Tensor, ...]
    count: Tensor  # of rows, int64 [] on the device
    is_begun: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    rows: list[int]
    sums: dict[int, _Sums] = field(default_factory=dict)
    counted: int = 0  # positions, from the first, whose rows were counted if they are selected


class Reductions:
    """Owner of all requests' sums, by slot, in float64; moments are of differences from a row."""

    def __init__(self, vectors: int, width: int, device: torch.device) -> None:
        self._table = torch.zeros(vectors, width, dtype=torch.float64, device=device)
        self._counts = torch.zeros(vectors, dtype=torch.int64, device=device)
        self._free = list(range(vectors - 1, -1, -1))
        self._requests: dict[int, _Request] = {}

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + self._counts.nbytes

    def __len__(self) -> int:
        return len(self._requests)

    def acquire(self, slot: int, segments: Iterable[Segment], widths: Sequence[int]) -> None:
        """Give a request the sums that its plan needs, if any. Pair with `release`."""
        taps: dict[int, tuple[str, set[int]]] = {}
        for segment in segments:
            for read in segment.patterns:
                if read.pattern.reduces:
                    taps.setdefault(read.capture, (read.pattern.kind, set()))[1].add(read.tap)
        if not taps:
            return
        width = self._table.shape[1]
        needs = {
            capture: (kind, total, -(-total // width))
            for capture, (kind, mine) in taps.items()
            if (total := sum(widths[tap] for tap in mine))
        }
        count = sum(SUMS[kind] * rows for kind, _, rows in needs.values())
        if count > len(self._free):
            raise NoRoomError("", f"no room for {count} vectors of sums")
        request = self._requests[slot] = _Request([self._free.pop() for _ in range(count)])
        left = iter(request.rows)
        for capture, (kind, total, rows) in needs.items():
            mine = [[next(left) for _ in range(rows)] for _ in range(SUMS[kind])]
            places = tuple(on_device(torch.tensor(indices), self._table.device) for indices in mine)
            counted = self._counts[mine[0][0]]
            counted.zero_()
            for place in places:
                self._table.index_fill_(0, place, -torch.inf if kind == "max" else 0.0)
            request.sums[capture] = _Sums(kind, total, places, counted)

    def release(self, slot: int) -> None:
        """Take back the sums of a request that has ended, if it has any."""
        request = self._requests.pop(slot, None)
        if request is not None:
            self._free += request.rows

    def counted(self, slot: int) -> int:
        """Return the number of positions of a request that were counted, from the first on."""
        request = self._requests.get(slot)
        return 0 if request is None else request.counted

    def advance(self, slot: int, stop: int) -> None:
        """Record that the rows of a request before position `stop` were counted."""
        request = self._requests.get(slot)
        if request is not None:
            request.counted = max(request.counted, stop)

    def add(self, slot: int, encoding: PatternEncoding, records: Tensor) -> None:
        """Count records [n, numbers] of a request."""
        request = self._requests.get(slot)
        if request is None:  # it has ended, and nobody reads its sums
            return
        for capture, columns in _by_capture(encoding).items():
            self._add(request.sums[capture], _vectors(columns, records))

    def rows(self, slots: Sequence[int], columns: PatternColumns, place: int) -> Tensor:
        """Return requests' reduced rows, float32 [requests, size]; for `place` see `place_of`."""
        rows = []
        for slot in slots:
            request = self._requests.get(slot)
            if request is None:
                rows.append(torch.zeros(columns.size, device=self._table.device))
                continue
            sums = request.sums[columns.capture]
            begin = place * columns.width
            parts = [values[begin : begin + columns.width].float() for values in self._values(sums)]
            count = sums.count.to(torch.int32).view(torch.float32).view(1)
            rows.append(torch.cat([count, *parts]))
        return torch.stack(rows)

    def check_integrity(self) -> None:
        """Check that each vector is free, or that of one request."""
        used = [row for request in self._requests.values() for row in request.rows]
        assert sorted([*self._free, *used]) == list(range(self._table.shape[0]))

    def _add(self, sums: _Sums, rows: Tensor) -> None:
        if sums.kind == "max":
            self._set(sums, 0, torch.maximum(self._get(sums, 0), rows.amax(0).double()))
        elif sums.kind == "mean":
            self._set(sums, 0, self._get(sums, 0) + rows.sum(0, dtype=torch.float64))
        else:
            if not sums.is_begun:
                self._set(sums, 0, rows[0].double())
            first, total, squares = (self._get(sums, index) for index in range(3))
            for part in rows.split(max(1, _WORKSPACE // (8 * rows.shape[1]))):
                apart = part.double() - first
                total = total + apart.sum(0)
                squares = squares + apart.square_().sum(0)
            self._set(sums, 1, total)
            self._set(sums, 2, squares)
        sums.is_begun = True
        sums.count.add_(rows.shape[0])

    def _values(self, sums: _Sums) -> list[Tensor]:
        """Return what a capture's rows are reduced to, float64 [width] each."""
        if sums.kind == "max":
            return [self._get(sums, 0)]
        if sums.kind == "mean":
            return [self._get(sums, 0) / sums.count]
        first, total, squares = (self._get(sums, index) for index in range(3))
        apart = total / sums.count
        return [first + apart, (squares / sums.count - apart.square()).clamp_(min=0)]

    def _get(self, sums: _Sums, index: int) -> Tensor:
        return self._table[sums.places[index]].view(-1)[: sums.width]

    def _set(self, sums: _Sums, index: int, values: Tensor) -> None:
        place, width = sums.places[index], self._table.shape[1]
        padded = torch.nn.functional.pad(values, (0, place.numel() * width - sums.width))
        self._table.index_copy_(0, place, padded.view(-1, width))


def _by_capture(encoding: PatternEncoding) -> dict[int, list[PatternColumns]]:
    """Return the taps of each capture that reduces the vectors of an encoding's records."""
    groups: dict[int, list[PatternColumns]] = {}
    for columns in encoding.patterns:
        if columns.kind in REDUCING:
            groups.setdefault(columns.capture, []).append(columns)
    return groups


def _vectors(columns: Sequence[PatternColumns], records: Tensor) -> Tensor:
    """Return the vectors of some taps, [n, numbers]: a view if they are neighbours."""
    parts = [(tap.start, tap.start + tap.width) for tap in columns]
    if all(before[1] == after[0] for before, after in pairwise(parts)):
        return records[:, parts[0][0] : parts[-1][1]]
    return torch.cat([records[:, start:stop] for start, stop in parts], 1)


def place_of(encoding: PatternEncoding, columns: PatternColumns) -> int:
    """Return the index of a tap among those of its capture on this rank."""
    mine = [pattern.place for pattern in encoding.patterns if pattern.capture == columns.capture]
    return sorted(mine).index(columns.place)
