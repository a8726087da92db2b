"""Sums of captured rows on the device, queued on the current stream: what rows are reduced to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from midstream.errors import NoRoomError
from midstream.plan.readouts.reduced import SUMS
from midstream.plan.resolved import REDUCING
from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.step.sum_cache import SumCache
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


class CountedRows(NamedTuple):
    """Records of consecutive positions of a request, [n, numbers]."""

    position: int  # of the first
    encoding: PatternEncoding
    records: Tensor


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
        self.kept: SumCache | None = None  # sums of cached tokens; None: there are none
        # Cached tokens of requests that run, maybe again, from the next step on.
        self._placed: dict[int, int] = {}

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
            request.sums[capture] = _Sums(kind, total, places, counted)
            self._clear(request.sums[capture])

    def release(self, slot: int) -> None:
        """Take back the sums of a request that has ended, if it has any."""
        request = self._requests.pop(slot, None)
        if request is not None:
            self._free += request.rows
            self._placed.pop(slot, None)
            if self.kept is not None:
                self.kept.release(slot)

    def place(self, slot: int, scores: Iterable[KeptScore], cached: int) -> None:
        """Note a request that is about to run, maybe again, after so many cached tokens: the next
        step begins with the sums of these.
        """
        request = self._requests.get(slot)
        if request is None or self.kept is None or not self.kept.is_on:
            return
        # Another rank may have all taps of a capture.
        sums = [kept for kept in scores if kept.nbytes and kept.slot in request.sums]
        if sums or self.kept.knows(slot):
            self.kept.begin(slot, sums, cached)
            self._placed[slot] = cached

    def count(self, pieces: Mapping[int, Sequence[CountedRows]], step: int) -> dict[int, int]:
        """Count a step's rows, by slot, each position once; return the requests without the sums of
        their cached tokens, with the number of these. A request may go on from the sums of another
        one in the same step.
        """
        placed, self._placed = self._placed, {}
        waiting = [slot for slot in pieces if slot not in placed] + list(placed)
        while waiting:
            left = [slot for slot in waiting if not self._begin(slot, placed.get(slot))]
            for slot in waiting:
                if slot not in left:
                    self._count(slot, pieces.get(slot, ()), step)
            if len(left) == len(waiting):
                break
            waiting = left
        missing = {}
        for slot in waiting:
            # Tokens that were cached because they were computed for the request itself.
            if self.counted(slot) >= placed[slot]:
                self._count(slot, pieces.get(slot, ()), step)
            else:
                missing[slot] = placed[slot]
        return missing

    def _begin(self, slot: int, cached: int | None) -> bool:
        """Let a request go on from its cached tokens, if it is about to run; whether it can."""
        request = self._requests.get(slot)
        if request is None or cached is None:
            return True
        assert self.kept is not None
        kept = [
            (sums, self.kept.read(slot, capture, cached)) for capture, sums in request.sums.items()
        ]
        if any(read is None for _, read in kept):
            return False
        for sums, read in kept:
            assert read is not None
            count, values = read
            if values is None:
                self._clear(sums)
            else:
                parts = on_device(values, self._table.device).view(SUMS[sums.kind], sums.width)
                for index, part in enumerate(parts):
                    self._set(sums, index, part)
            sums.is_begun = count > 0
            sums.count.fill_(count)
        request.counted = cached
        return True

    def _count(self, slot: int, pieces: Sequence[CountedRows], step: int) -> None:
        request = self._requests.get(slot)
        if request is None:  # it has ended, and nobody reads its sums
            return
        for piece in sorted(pieces, key=itemgetter(0)):
            stop = piece.position + piece.records.shape[0]
            start = max(piece.position, request.counted)
            if start >= stop:
                continue
            records = piece.records[start - piece.position :]
            for capture, columns in _by_capture(piece.encoding).items():
                sums, rows = request.sums[capture], _vectors(columns, records)
                marks = None if self.kept is None else self.kept.marks(slot, capture, start, stop)
                if self.kept is None or marks is None or not marks.size:
                    self._add(sums, rows)
                else:
                    after = self._add(sums, rows, (marks - start).tolist())
                    self.kept.write(slot, capture, marks, after, step)
            request.counted = stop

    def counted(self, slot: int) -> int:
        """Return the number of positions of a request that were counted, from the first on."""
        request = self._requests.get(slot)
        return 0 if request is None else request.counted

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

    def _add(self, sums: _Sums, rows: Tensor, at: Sequence[int] = ()) -> Tensor:
        """Count rows in their order, whatever the pieces in which they come; return the sums after
        each of the rows `at`, float64 [len(at), numbers].
        """
        if not sums.is_begun and sums.kind == "moments":
            self._set(sums, 0, rows[0].double())
        states = [self._get(sums, index) for index in range(SUMS[sums.kind])]
        after, begin = [], 0
        for part in rows.split(max(1, _WORKSPACE // (8 * rows.shape[1]))):
            here = [row - begin for row in at if begin <= row < begin + part.shape[0]]
            running = _running(sums.kind, states, part.double())
            states = [values[-1] for values in running]
            after += [torch.cat([values[row] for values in running]) for row in here]
            begin += part.shape[0]
        for index, values in enumerate(states):
            self._set(sums, index, values)
        sums.is_begun = True
        sums.count.add_(rows.shape[0])
        return torch.stack(after) if after else rows.new_zeros(0, 0)

    def _values(self, sums: _Sums) -> list[Tensor]:
        """Return what a capture's rows are reduced to, float64 [width] each."""
        if sums.kind == "max":
            return [self._get(sums, 0)]
        if sums.kind == "mean":
            return [self._get(sums, 0) / sums.count]
        first, total, squares = (self._get(sums, index) for index in range(3))
        apart = total / sums.count
        return [first + apart, (squares / sums.count - apart.square()).clamp_(min=0)]

    def _clear(self, sums: _Sums) -> None:
        sums.count.zero_()
        sums.is_begun = False
        for place in sums.places:
            self._table.index_fill_(0, place, -torch.inf if sums.kind == "max" else 0.0)

    def _get(self, sums: _Sums, index: int) -> Tensor:
        return self._table[sums.places[index]].view(-1)[: sums.width]

    def _set(self, sums: _Sums, index: int, values: Tensor) -> None:
        place, width = sums.places[index], self._table.shape[1]
        padded = torch.nn.functional.pad(values, (0, place.numel() * width - sums.width))
        self._table.index_copy_(0, place, padded.view(-1, width))


def _running(kind: str, states: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Return the sums after each of some rows, float64 [n, numbers], given those before them.

    Down the rows, a cumulative sum adds one after the other on all devices.
    """
    if kind == "max":
        return [torch.cat([states[0][None], rows]).cummax(0).values[1:]]
    if kind == "mean":
        return [torch.cat([states[0][None], rows]).cumsum(0)[1:]]
    first, total, squares = states
    apart = rows - first
    parts = (total, apart), (squares, apart.square())
    sums = [torch.cat([before[None], more]).cumsum(0)[1:] for before, more in parts]
    return [first.expand_as(rows), *sums]


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
