"""Rows of requests that stay on the device, for the edits of later requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from midstream.errors import NoRoomError, SpecError
from midstream.plan import ResolvedPlan
from midstream.plan.resolved import ON_DEVICE
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.protocol.runs import Ints, expand
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.sites import Tap, show_tap

_AT_ONCE = 256  # rows that are read at a time, as float64


@dataclass(slots=True, eq=False)
class _TapRows:
    """The rows of one tap of a request."""

    positions: Ints  # ascending
    places: Ints  # of each, its row of the table
    stored: list[bool]  # whether it was computed

    def number(self, position: int) -> int | None:
        """Return the number of a position among the stored ones; None: it is none of them."""
        number = int(np.searchsorted(self.positions, position))
        is_known = number < self.positions.size and self.positions[number] == position
        return number if is_known and self.stored[number] else None


@dataclass(slots=True, eq=False)
class _Source:
    weights: int  # number of the state of the weights when the request began
    rows: dict[Tap, _TapRows] = field(default_factory=dict)


class DeviceRowTable:
    """Owner of the rows by request, in the model's dtype. Front ends count them, and say when they
    are freed: what is queued on the current stream reads them before later rows are written.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        taps: Mapping[Tap, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._table = torch.zeros(rows, width, dtype=dtype, device=device)
        self._taps = dict(taps)
        self._tap_of = {index: tap for tap, index in taps.items()}
        self._free = list(range(rows - 1, -1, -1))
        self._sources: dict[str, _Source] = {}
        self.weights: Callable[[], int] = int  # number of the current state of the weights

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def __len__(self) -> int:
        return len(self._sources)

    def acquire(self, uid: str, plan: ResolvedPlan) -> None:
        """Make room for the rows that a request leaves on the device. Pair with `free`."""
        self.free([uid])
        source = _Source(self.weights())
        for capture in plan.captures:
            if capture.pattern is None or capture.pattern.kind != ON_DEVICE:
                continue
            positions = expand(
                tuple((start, stop) for start, stop in capture.where.ranges if stop is not None)
            )
            for tap in capture.pattern.reads:
                if tap not in self._taps:
                    continue
                if positions.size > len(self._free):
                    self._release(source)
                    raise NoRoomError("", f"no room for {positions.size} rows on the device")
                places = np.array([self._free.pop() for _ in range(positions.size)], np.int64)
                source.rows[tap] = _TapRows(positions, places, [False] * positions.size)
        self._sources[uid] = source

    def store(self, uid: str, tap: int, first: int, rows: Tensor) -> None:
        """Queue the copy of the rows [n, width] of the positions from `first` on of a tap."""
        source = self._sources.get(uid)
        mine = None if source is None else source.rows.get(self._tap_of[tap])
        if mine is None:  # freed: nobody reads them
            return
        begin = int(np.searchsorted(mine.positions, first))
        stop = begin + len(rows)
        places = on_device(torch.from_numpy(mine.places[begin:stop]), self._table.device)
        self._table.index_copy_(0, places, rows)
        mine.stored[begin:stop] = [True] * len(rows)

    def check(self, rows: Iterable[DeviceRow]) -> None:
        """Check that rows are here. Raises SpecError."""
        for row in rows:
            source = self._sources.get(row.source)
            if source is None:
                raise SpecError("", f"the rows of request {row.source} are not on the device")
            if source.weights != self.weights():
                raise SpecError(
                    "",
                    f"the rows of request {row.source} are of other weights than the model has "
                    "now; capture them again",
                )
            self._place(row)

    def read(self, rows: Sequence[DeviceRow]) -> Tensor:
        """Return rows as float32 [n, width], each as it is or divided by its norm."""
        device, parts = self._table.device, []
        for first in range(0, len(rows), _AT_ONCE):
            some = rows[first : first + _AT_ONCE]
            places = torch.tensor([self._place(row) for row in some])
            values = self._table[on_device(places, device)].double()
            norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            is_unit = on_device(torch.tensor([row.is_unit for row in some]), device)[:, None]
            parts.append(torch.where(is_unit, values / norms, values).float())
        return torch.cat(parts)

    def free(self, uids: Iterable[str]) -> None:
        """Free what requests left here; others are ignored."""
        for uid in uids:
            source = self._sources.pop(uid, None)
            if source is not None:
                self._release(source)

    def check_integrity(self) -> None:
        """Check that each row is free, or that of one request."""
        every = [rows for source in self._sources.values() for rows in source.rows.values()]
        used = [place for rows in every for place in rows.places.tolist()]
        assert sorted([*self._free, *used]) == list(range(self._table.shape[0]))

    def _release(self, source: _Source) -> None:
        for rows in source.rows.values():
            self._free += rows.places.tolist()

    def _place(self, row: DeviceRow) -> int:
        mine = self._sources[row.source].rows.get(row.tap)
        number = None if mine is None else mine.number(row.position)
        if mine is None or number is None:
            raise SpecError(
                "",
                f"request {row.source} left no row of {show_tap(row.tap)} at position "
                f"{row.position} on the device",
            )
        return int(mine.places[number])
