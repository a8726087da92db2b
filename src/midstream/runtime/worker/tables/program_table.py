"""Programs and capture groups, stored once, with use counts; unused ones stay for a while."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from midstream.errors import NoRoomError
from midstream.ops import layout
from midstream.ops.layout import Op
from midstream.runtime.protocol.segments import Edits, TapProgramStep
from midstream.runtime.worker.tables.device_buffers import Buffers, upload
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.tables.instruction_store import InstructionStore


@dataclass(slots=True)
class _Entry:
    """A program with its range of instructions, or a group, which has none."""

    index: int
    first: int = 0
    length: int = 0
    users: int = 0


class ProgramTable:
    """Owner of `Buffers.table`."""

    def __init__(self, buffers: Buffers, device_rows: DeviceRowTable | None = None) -> None:
        self._buffers = buffers
        self._num_taps, self._rows, _ = buffers.table.shape
        self.instructions = InstructionStore(buffers, device_rows)
        self._programs: dict[Edits, _Entry] = {}
        self._unused: set[Edits] = set()  # programs without a user
        self._groups: dict[tuple[int, ...], _Entry] = {}
        self._unused_groups: set[tuple[int, ...]] = set()  # groups without a user
        self._free_programs = list(range(self._rows - 1, layout.FIRST_FREE_PROGRAM - 1, -1))
        self._free_groups = list(range(self._rows - 1, layout.FIRST_FREE_GROUP - 1, -1))
        self.fewest = np.zeros(self._rows, np.int32)  # edits that a token must get in a pass
        self.most = np.zeros(self._rows, np.int32)  # that it may get; the others depend on its id
        self.by_position = np.zeros(self._rows, np.bool_)  # it reads the position
        self.doses = np.zeros(self._rows, np.int32)  # columns of doses, with those between
        self.by_id = np.zeros(self._rows, np.bool_)  # it reads the token's id

    def acquire_program(self, edits: Edits) -> int:
        """Return the index of the program of these edits, in order. Pair with `release_program`."""
        if not edits:
            return layout.WATCH_PROGRAM
        program = self._programs.get(edits)
        if program is None:
            program = self._programs[edits] = self._write_program(edits)
        self._unused.discard(edits)
        program.users += 1
        return program.index

    def release_program(self, edits: Edits) -> None:
        if edits:
            self._programs[edits].users -= 1
            if not self._programs[edits].users:
                self._unused.add(edits)

    def drop_unused(self) -> None:
        """Free what programs and groups take that no request uses."""
        for edits in self._unused:
            program = self._programs.pop(edits)
            self._free_programs.append(program.index)
            self.instructions.release(edits, program.first, program.length)
        self._unused.clear()
        self._free_groups += [self._groups.pop(taps).index for taps in self._unused_groups]
        self._unused_groups.clear()

    @property
    def in_use(self) -> int:
        return len(self._programs) - len(self._unused)

    def edits_of(self, index: int) -> Edits:
        """Return the edits of a program in use; a linear search."""
        matches = [edits for edits, program in self._programs.items() if program.index == index]
        return matches[0] if matches else ()

    def acquire_group(self, taps: tuple[int, ...]) -> int:
        """Return the index of the group that captures these taps. Pair with `release_group`."""
        if not taps:
            return layout.NO_GROUP
        group = self._groups.get(taps)
        if group is None:
            if not self._free_groups:
                self.drop_unused()
            if not self._free_groups:
                raise NoRoomError("", self._full("combinations of captures"))
            group = _Entry(self._free_groups.pop())
            places = torch.zeros(self._num_taps, dtype=torch.int32)
            place = 1
            for tap in taps:
                places[tap] = place
                place += self._buffers.units[tap]
            upload(self._buffers.table[:, group.index, layout.PLACE], places)
            self._groups[taps] = group
        self._unused_groups.discard(taps)
        group.users += 1
        return group.index

    def release_group(self, taps: tuple[int, ...]) -> None:
        if taps:
            self._groups[taps].users -= 1
            if not self._groups[taps].users:
                self._unused_groups.add(taps)

    def check_integrity(self) -> None:
        """Check that everything is either in use or free; cheap."""
        for entries, unused in (
            (self._programs, self._unused),
            (self._groups, self._unused_groups),
        ):
            assert unused == {key for key, entry in entries.items() if not entry.users}
        assert len(self._free_programs) + len(self._programs) == (
            self._rows - layout.FIRST_FREE_PROGRAM
        )
        assert len(self._free_groups) + len(self._groups) == self._rows - layout.FIRST_FREE_GROUP
        assert self._programs or self.instructions.is_empty

    def _write_program(self, edits: Edits) -> _Entry:
        if not self._free_programs:
            self.drop_unused()
        if not self._free_programs:
            raise NoRoomError("", self._full("combinations of edits"))
        index = self._free_programs.pop()
        try:
            with suppress(NoRoomError):
                return self._place(edits, index)
            self.drop_unused()
            with suppress(NoRoomError):
                return self._place(edits, index)
            # The free space may only be fragmented.
            self._compact()
            return self._place(edits, index)
        except Exception:
            self._free_programs.append(index)
            raise

    def _compact(self) -> None:
        """Write the programs in use again, without gaps, behind the steps that are queued."""
        self.instructions.reset()
        for edits, program in self._programs.items():
            program.first = self._place(edits, program.index).first

    def _place(self, edits: Edits, index: int) -> _Entry:
        """Write a program to the device, or nothing."""
        # The taps of a request may be in any order; the edits of one tap keep theirs.
        ordered = sorted(edits, key=lambda edit: edit.tap)
        kinds = {
            tap: _kind(list(of_tap)) for tap, of_tap in groupby(ordered, key=lambda edit: edit.tap)
        }
        first, length = self.instructions.write(ordered)
        ranges = np.zeros((self._num_taps, layout.TABLE_COLUMNS), np.int32)
        for tap, kind in kinds.items():
            ranges[tap, layout.KIND] = kind
        start = first
        for edit in ordered:
            row = ranges[edit.tap]
            if row[layout.EDIT_COUNT] == 0:
                row[layout.EDIT_START] = start
            row[layout.EDIT_COUNT] += len(edit.steps)
            start += len(edit.steps)
        table = self._buffers.table
        # The row is shared with the group of the same index, whose column PLACE is not changed.
        columns = slice(layout.EDIT_START, layout.EDIT_COUNT + 1)
        upload(table[:, index, columns], torch.from_numpy(ranges[:, columns].copy()))
        upload(table[:, index, layout.KIND], torch.from_numpy(ranges[:, layout.KIND].copy()))
        counted = [(edit.counted, edit.by_token) for edit in edits]
        self.fewest[index] = sum(count for count, by_id in counted if not by_id)
        self.most[index] = sum(count for count, _ in counted)
        self.by_id[index] = any(by_id for _, by_id in counted)
        doses = max((edit.dose + 1 for edit in edits if edit.dose is not None), default=0)
        self.doses[index] = min(doses, self._buffers.doses)
        self.by_position[index] = any(
            step.by_position or step.op is Op.SCAN for edit in edits for step in edit.steps
        )
        return _Entry(index, first, length)

    def _full(self, what: str) -> str:
        return f"the running requests use all {self._rows} {what}; raise the setting `programs`"


def _kind(edits: Sequence[TapProgramStep]) -> int:
    simple = [
        layout.simple_kind(
            step.op, step.flags, edit.by_token or step.mask is not None, step.slot is not None
        )
        for edit in edits
        for step in edit.steps
    ]
    return layout.kind_of([step.op for edit in edits for step in edit.steps], simple)
