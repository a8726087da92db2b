"""Which captured rows of which request lie in which step's shipment.

A step only adds its arrays; rows are sorted out by request when they are taken, for many requests
at once, so that neither costs Python per row, per request or per layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Copy, Shipment

_Kind = tuple[tuple[int, ...], int]  # taps, codec
_FOREVER = np.iinfo(np.int64).max // 2


class RowSource(Protocol):
    """What of a step the ledger looks at: rows, as wide as they are."""

    def rows(self) -> Tensor:
        """[rows, width] on the host. Waits until they are there."""
        ...

    def free(self) -> None:
        """Nothing in it is held any more. Called once."""
        ...


R = TypeVar("R", bound=RowSource)


@dataclass(frozen=True, slots=True)
class RowBlock(Generic[R]):
    """One request's rows of one kind of record, which lie where they arrived.

    Attributes:
        taps: the taps in each record, in order, as indices on this rank.
        codec: the number of how they are encoded.
        positions: int64 [n], ascending, each once.
        sources: where they lie.
        source: int64 [n], per position which of the sources.
        first: int64 [n], per position the source's row at which its record begins.
    """

    taps: tuple[int, ...]
    codec: int
    positions: Ints
    sources: list[R]
    source: Ints
    first: Ints

    @property
    def values(self) -> Tensor:
        """[n, taps, width], a copy. Waits for the rows."""
        width = len(self.taps)
        sample = self.sources[int(self.source[0])].rows()
        values = torch.empty(self.source.size, width, sample.shape[1], dtype=sample.dtype)
        for nth in np.unique(self.source).tolist():
            here = np.flatnonzero(self.source == nth)
            rows = self.sources[nth].rows()
            index = torch.from_numpy((self.first[here, None] + np.arange(width)).ravel())
            values[torch.from_numpy(here)] = rows[index].view(here.size, width, -1)
        return values

    def since(self, position: int) -> RowBlock[R]:
        """The rows at that position and behind it."""
        begin = int(np.searchsorted(self.positions, position))
        if not begin:
            return self
        return RowBlock(
            self.taps,
            self.codec,
            self.positions[begin:],
            self.sources,
            self.source[begin:],
            self.first[begin:],
        )

    def runs(self) -> list[tuple[int, int, int]]:
        """Per run of records that lie one behind the other: its source, its first row, how many
        records.
        """
        source, first, size = self.source, self.first, self.first.size
        breaks = (source[1:] != source[:-1]) | (first[1:] - first[:-1] != len(self.taps))
        begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        lengths = [stop - start for start, stop in pairwise([*begins, size])]
        return list(zip(source[begins].tolist(), first[begins].tolist(), lengths, strict=True))


@dataclass(frozen=True, slots=True)
class Scores:
    """A shipment's scores, as rows: one for each token of the step."""

    shipment: Shipment

    def rows(self) -> Tensor:
        return self.shipment.scores()

    def free(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ArenaRows:
    """Encoded rows in the arena: uint8 [rows, bytes of a row]."""

    shipment: Shipment
    extent: Extent
    row_bytes: int
    arena: Arena

    def rows(self) -> Tensor:
        self.shipment.wait()
        return self.extent.memory.view(-1, self.row_bytes)

    def free(self) -> None:
        self.arena.release([self.extent.segment])


@dataclass(frozen=True, slots=True)
class PendingPositions:
    """Positions that the device knows and the host does not yet: of some rows of a step.

    Attributes:
        copy: the position of each row of the step, on its way.
        row: which rows.
    """

    copy: Copy
    row: Ints

    def __getitem__(self, mask: NDArray[np.bool_]) -> PendingPositions:
        return PendingPositions(self.copy, self.row[mask])

    def values(self) -> Ints:
        """The positions. Waits until they are there."""
        return self.copy.values().numpy()[self.row].astype(np.int64)


@dataclass(frozen=True, slots=True)
class StepRecord(Generic[R]):
    """One step's records. Per run of rows: whose, from which position and row on, how many.

    Attributes:
        number: of the step; later ones have greater numbers.
    """

    number: int
    shipment: R
    serial: Ints
    position: Ints | PendingPositions
    length: Ints
    first: Ints
    kind: Ints

    def only(self, mask: NDArray[np.bool_]) -> StepRecord[R]:
        """Some of its runs."""
        return StepRecord(
            self.number,
            self.shipment,
            self.serial[mask],
            self.position[mask],
            self.length[mask],
            self.first[mask],
            self.kind[mask],
        )

    @property
    def known(self) -> Ints:
        """Position of each run's first row. Waits until the host knows it."""
        return (
            self.position.values() if isinstance(self.position, PendingPositions) else self.position
        )

    def within(self, start: Ints | int, stop: Ints | int, width: Ints | int) -> StepRecord[R]:
        """Its runs cut to positions [start, stop), given per run or for all; a record is `width`
        rows.
        """
        position = self.known
        begin = np.maximum(position, start)
        length = np.minimum(position + self.length, stop) - begin
        first = self.first + (begin - position) * width
        cut = StepRecord(self.number, self.shipment, self.serial, begin, length, first, self.kind)
        return cut.only(length > 0)

    def joined(self, other: StepRecord[R]) -> StepRecord[R]:
        """With other runs of the same step. Waits until the host knows where they are."""
        if not other.serial.size or not self.serial.size:
            return self if self.serial.size else other
        pairs = (
            (self.serial, other.serial),
            (self.known, other.known),
            (self.length, other.length),
            (self.first, other.first),
            (self.kind, other.kind),
        )
        return StepRecord(self.number, self.shipment, *(np.concatenate(pair) for pair in pairs))


class CapturedRowIndex(Generic[R]):
    """Owner of the shipments between a step and the taking of its last row."""

    def __init__(self) -> None:
        self._entries: list[StepRecord[R]] = []
        self._kinds: dict[_Kind, int] = {}
        self._keys: list[_Kind] = []
        self._spent: list[R] = []
        self._noted = 0

    def kind(self, taps: tuple[int, ...], codec: int = 0) -> int:
        """The number by which records of these taps, so encoded, are known from now on."""
        key = (taps, codec)
        if key not in self._kinds:
            self._kinds[key] = len(self._keys)
            self._keys.append(key)
        return self._kinds[key]

    def __len__(self) -> int:
        """Steps of which rows are still held."""
        return len(self._entries)

    def note(
        self,
        shipment: R,
        serial: Ints,
        position: Ints | PendingPositions,
        length: Ints,
        first: Ints,
        kind: Ints,
    ) -> None:
        """Takes in a step's runs of captured rows.

        Args:
            shipment: where the rows come.
            serial: per run, the number of the request.
            position: per run, position of its first row.
            length: per run, how many records.
            first: per run, the shipment's row at which its first record begins.
            kind: per run, what `kind` said of its taps.
        """
        if serial.size:
            self._entries.append(
                StepRecord(self._noted, shipment, serial, position, length, first, kind)
            )
            self._noted += 1

    @property
    def noted(self) -> int:
        """How many steps were noted: the number of the next."""
        return self._noted

    def take(self, serials: list[int]) -> dict[int, list[RowBlock[R]]]:
        """Each request's blocks; what is taken is no longer held, but not freed before
        `free_spent`.

        A position that was computed twice, for a draft that was rejected say, counts once, with the
        row that came last.
        """
        wanted = np.array(serials, np.int64)
        chosen: list[StepRecord[R]] = []
        kept: list[StepRecord[R]] = []
        for entry in self._entries:
            mask = np.isin(entry.serial, wanted)
            if mask.any():
                chosen.append(entry.only(mask))
                if mask.all():
                    self._spent.append(entry.shipment)
                    continue
                entry = entry.only(~mask)
            kept.append(entry)
        self._entries = kept
        return self._blocks(chosen, serials)

    def take_until(
        self, stops: Mapping[int, int], oldest: int
    ) -> tuple[dict[int, list[RowBlock[R]]], int]:
        """As `take`, of rows at positions below a stop only.

        Args:
            stops: per request's number, the position.
            oldest: the number of a step before which there are no rows of these requests.

        Returns:
            The blocks; and a step before which there are none any more.
        """
        numbers = np.array(sorted(stops), np.int64)
        bounds = np.array([stops[number] for number in numbers.tolist()], np.int64)
        widths = np.array([len(taps) for taps, _ in self._keys], np.int64)
        begin = bisect_left(self._entries, oldest, key=lambda entry: entry.number)
        entries = self._entries[begin:]
        del self._entries[begin:]
        chosen: list[StepRecord[R]] = []
        remains = self._noted
        for entry in entries:
            mask = np.isin(entry.serial, numbers)
            if not mask.any():
                self._entries.append(entry)
                continue
            mine = entry.only(mask)
            stop, width = bounds[np.searchsorted(numbers, mine.serial)], widths[mine.kind]
            taken, rest = mine.within(0, stop, width), mine.within(stop, _FOREVER, width)
            if rest.serial.size:
                remains = min(remains, entry.number)
            if taken.serial.size:
                chosen.append(taken)
                entry = entry.only(~mask).joined(rest)
            if entry.serial.size:
                self._entries.append(entry)
            else:
                self._spent.append(entry.shipment)
        return self._blocks(chosen, list(stops)), remains

    def _blocks(
        self, chosen: list[StepRecord[R]], serials: list[int]
    ) -> dict[int, list[RowBlock[R]]]:
        found: dict[int, list[RowBlock[R]]] = {serial: [] for serial in serials}
        present = {kind for entry in chosen for kind in np.unique(entry.kind).tolist()}
        for kind in sorted(present):
            for serial, block in _sort_out(chosen, self._keys[kind], kind):
                found[serial].append(block)
        return found

    def free_spent(self) -> None:
        """Frees the shipments of which all was taken."""
        spent, self._spent = self._spent, []
        for shipment in spent:
            shipment.free()

    def look(
        self, taps: tuple[int, ...], spans: Mapping[int, tuple[int, int]], count: int
    ) -> dict[int, RowBlock[R]]:
        """Some rows of some requests, which stay held. Waits for those rows only.

        Args:
            taps: the kind of record.
            spans: per request's number, [start, stop) of the positions.
            count: how many rows there are to be, over all requests. Older steps are looked at
                only until that many are found.
        """
        key = (taps, 0)
        kind = self._kinds.get(key)
        if kind is None or not count:
            return {}
        numbers = np.array(sorted(spans), np.int64)
        bounds = np.array([spans[number] for number in numbers.tolist()], np.int64)
        chosen: list[StepRecord[R]] = []
        blocks: dict[int, RowBlock[R]] = {}
        seen = 0
        for entry in reversed(self._entries):
            mine = entry.only((entry.kind == kind) & np.isin(entry.serial, numbers))
            whose = np.searchsorted(numbers, mine.serial)
            mine = mine.within(bounds[whose, 0], bounds[whose, 1], len(taps))
            if mine.serial.size:
                chosen.insert(0, mine)
                seen += int(mine.length.sum())
            if seen >= count:
                # A position that was computed twice is in two steps, and counts once.
                blocks = dict(_sort_out(chosen, key, kind))
                seen = sum(block.positions.size for block in blocks.values())
                if seen >= count:
                    return blocks
        return dict(_sort_out(chosen, key, kind))


def _sort_out(chosen: list[StepRecord[R]], key: _Kind, kind: int) -> list[tuple[int, RowBlock[R]]]:
    """The blocks of one kind, with the numbers of their requests."""
    taps, codec = key
    steps: list[Ints] = []
    serials: list[Ints] = []
    positions: list[Ints] = []
    firsts: list[Ints] = []
    for nth, entry in enumerate(chosen):
        mine = entry.kind == kind
        length = entry.length[mine]
        within = within_runs(length)
        steps.append(np.full(within.size, nth))
        serials.append(np.repeat(entry.serial[mine], length))
        positions.append(np.repeat(entry.known[mine], length) + within)
        firsts.append(np.repeat(entry.first[mine], length) + within * len(taps))
    if not steps:
        return []
    step, serial = np.concatenate(steps), np.concatenate(serials)
    position, first = np.concatenate(positions), np.concatenate(firsts)
    if step.size == 0:
        return []
    order = np.lexsort(np.stack((step, position, serial)))
    step, serial, position, first = step[order], serial[order], position[order], first[order]
    last = np.append((serial[1:] != serial[:-1]) | (position[1:] != position[:-1]), True)
    step, serial, position, first = step[last], serial[last], position[last], first[last]
    sources = [entry.shipment for entry in chosen]
    starts = np.append(0, np.flatnonzero(serial[1:] != serial[:-1]) + 1)
    stops = np.append(starts[1:], serial.size)
    return [
        (
            int(serial[start]),
            RowBlock(
                taps,
                codec,
                position[start:stop],
                sources,
                step[start:stop],
                first[start:stop],
            ),
        )
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
