"""Instructions of programs on the device, with their vectors and lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import NoRoomError
from midstream.ops import layout
from midstream.ops.layout import Flags
from midstream.plan import Vector
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.protocol.segments import Edits, TapProgramStep, vectors_of
from midstream.runtime.worker.tables.device_buffers import Buffers, on_device, scatter, upload
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.tables.range_pool import Pool, RangeAllocator

_FRESH, _OTHER_IDS = int(Flags.FRESH), int(Flags.OTHER_IDS)  # see `midstream.plan.instructions`
# Numbers of a run of vectors that is copied by itself, straight into the bank: the others are
# copied together, through as much memory of the device again.
_ALONE = 1 << 18


class InstructionStore:
    """Owner of `Buffers.instructions`, `params`, `lists` and `bank`; equal ones are there once."""

    def __init__(self, buffers: Buffers, device_rows: DeviceRowTable | None = None) -> None:
        self._buffers = buffers
        self.device_rows = device_rows
        self.reset()

    def reset(self) -> None:
        """Free everything. What is on the device stays as it is until it is overwritten."""
        self.bank = Pool(self._buffers.bank.shape[0])
        self.lists = Pool(self._buffers.lists.shape[0])
        self.ranges = RangeAllocator(self._buffers.instructions.shape[0])

    @property
    def is_empty(self) -> bool:
        free = self.ranges.free == self.ranges.size
        return free and self.bank.used == 0 and self.lists.used == 0

    def write(self, edits: Sequence[TapProgramStep]) -> tuple[int, int]:
        """Write edits' instructions in order, or nothing; return their range, to be released."""
        length = sum(len(edit.steps) for edit in edits)
        first = self.ranges.acquire(length)
        if first is None:
            raise NoRoomError(
                "",
                f"{length} instructions do not fit beside those in use: the limit is "
                f"{self.ranges.size}; raise the setting `max_edits`",
            )
        try:
            words, numbers = self._encode(edits)
        except NoRoomError:
            self.ranges.release(first, length)
            raise
        stop = first + length
        upload(self._buffers.instructions[first:stop], torch.from_numpy(words))
        upload(self._buffers.params[first:stop], torch.from_numpy(numbers))
        return first, length

    def release(self, edits: Edits, first: int, length: int) -> None:
        """Release the range of instructions of edits, their vectors and their lists."""
        self.ranges.release(first, length)
        for edit in edits:
            if edit.ids:
                self.lists.release(edit.ids)
            for step in edit.steps:
                for vectors in vectors_of(step):
                    self.bank.release(vectors)

    def _encode(
        self, edits: Sequence[TapProgramStep]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Write the vectors and lists of instructions; return their words and params."""
        words: list[list[int]] = []
        numbers: list[tuple[float, ...]] = []
        unit = self._buffers.unit
        new_units: list[int] = []
        new_vectors: list[Vector] = []
        copied: list[tuple[int, DeviceRow]] = []  # from the device, with its first unit
        acquired: list[tuple[Pool, object]] = []

        def rows(vectors: tuple[Vector, ...]) -> int:
            units = sum(vector.size for vector in vectors) // unit
            allocation = self.bank.acquire(vectors, units)
            if allocation is None:
                raise NoRoomError(
                    "",
                    f"{len(vectors)} vectors, {units * unit} numbers, do not fit beside those in "
                    f"use: the vector bank has {self.bank.size * unit}; raise the setting "
                    "`bank_rows`, or run fewer vectors at once",
                )
            acquired.append((self.bank, vectors))
            start, is_new = allocation
            if is_new and any(isinstance(vector, DeviceRow) for vector in vectors):
                unit_of_row = start
                for vector in vectors:
                    mine = range(unit_of_row, unit_of_row + vector.size // unit)
                    if isinstance(vector, DeviceRow):
                        copied.append((unit_of_row, vector))
                    else:
                        new_units.extend(mine)
                        new_vectors.append(vector)
                    unit_of_row = mine.stop
            elif is_new and units * unit >= _ALONE:
                data = bytearray().join([vector.data for vector in vectors])
                values = torch.frombuffer(data, dtype=torch.float32).view(-1, unit)
                upload(self._buffers.bank[start : start + units], values)
            elif is_new:
                new_units.extend(range(start, start + units))
                new_vectors.extend(vectors)
            return start

        try:
            for edit in edits:
                start, count = edit.bit or 0, 0 if edit.bit is None else layout.BY_BIT
                others = _OTHER_IDS if edit.others else 0
                if edit.ids:
                    start, count = self._write_ids(edit.ids), len(edit.ids)
                    acquired.append((self.lists, edit.ids))
                dose = self._dose_slot(edit)
                for index, step in enumerate(edit.steps):
                    flags = int(step.flags) | others
                    read = 0 if step.read is None else rows((step.read,))
                    write = rows(step.write) if step.write else step.hold
                    if step.by_position:
                        write -= step.first * (step.write[0].size // unit)
                    slot = 0 if step.slot is None else 1 + step.slot
                    if dose and not index:
                        flags |= _FRESH  # which changes no result: nothing of the edit came before
                    if dose and index == len(edit.steps) - 1:
                        slot = dose
                    mask = 0 if step.mask is None else 1 + rows((step.mask,))
                    words.append([int(step.op), read, write, slot, flags, start, count, mask])
                    numbers.append((step.a, step.b, step.c, step.d))
        except NoRoomError:
            for pool, key in acquired:
                pool.release(key)
            raise
        if new_vectors:
            data = bytearray().join([vector.data for vector in new_vectors])
            values = torch.frombuffer(data, dtype=torch.float32).view(-1, unit)
            scatter(self._buffers.bank, new_units, values)
        if copied:
            self._copy(copied)
        return np.array(words, np.int32), np.array(numbers, np.float32)

    def _copy(self, copied: Sequence[tuple[int, DeviceRow]]) -> None:
        """Queue the copy of rows on the device into the bank, each from a unit on."""
        assert self.device_rows is not None
        rows = self.device_rows.read([row for _, row in copied])
        bank, width = self._buffers.bank, rows.shape[1] // self._buffers.unit
        first = torch.tensor([start for start, _ in copied])[:, None] + torch.arange(width)
        units = on_device(first.view(-1), bank.device)
        bank.index_copy_(0, units, rows.view(-1, self._buffers.unit))

    def _dose_slot(self, edit: TapProgramStep) -> int:
        """Return 1 + the column of an edit's dose; 0: it has none."""
        is_measured = edit.dose is not None and edit.dose < self._buffers.doses
        return 1 + edit.dose if is_measured and edit.dose is not None else 0

    def _write_ids(self, ids: tuple[int, ...]) -> int:
        """Return the start of a list of token ids, which is written if it is new."""
        allocation = self.lists.acquire(ids, len(ids))
        if allocation is None:
            raise NoRoomError(
                "",
                f"{len(ids)} token ids do not fit beside those in use: the limit is "
                f"{self.lists.size}; raise the setting `token_ids`",
            )
        start, is_new = allocation
        if is_new:
            lists = self._buffers.lists[start : start + len(ids)]
            upload(lists, torch.tensor(ids, dtype=torch.int32))
        return start
