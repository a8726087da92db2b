"""Programs (which edits) and groups (which captures): interned, counted, written to the device.

Many requests ask for the same; a token names what it asks for by one small integer, and the cost
of a step does not depend on how many different ones are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.runtime.bank import VectorBank
from midstream.runtime.buffers import Buffers, upload
from midstream.runtime.ranges import RangeAllocator
from midstream.spec import Vector


@dataclass(frozen=True, slots=True)
class Edit:
    """One addition at one tap: h += scale · vector."""

    tap: int  # index of the tap on this rank
    vector: Vector
    scale: float


@dataclass(slots=True)
class _Program:
    index: int
    edits: tuple[Edit, ...]
    first: int
    users: int = 0


@dataclass(slots=True)
class _Group:
    index: int
    users: int = 0


class Tables:
    """Owner of `Buffers.table`, `edit_rows`, `edit_scales` and, through the bank, `bank`."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._bank = VectorBank(buffers.bank)
        self._num_taps, self._rows, _ = buffers.table.shape
        self._edits = RangeAllocator(buffers.edit_rows.shape[0])
        self._programs: dict[tuple[Edit, ...], _Program] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._free_programs = list(range(self._rows - 1, layout.FIRST_FREE_PROGRAM - 1, -1))
        self._free_groups = list(range(self._rows - 1, layout.FIRST_FREE_GROUP - 1, -1))
        # Edits that a token of a program is to get in one forward, by program.
        self.edit_counts = np.zeros(self._rows, np.int32)

    def acquire_program(self, edits: tuple[Edit, ...]) -> int:
        """The index of the program of these edits, in this order. Pair with `release_program`.

        Raises:
            SpecError: there is no room; the message names the setting.
        """
        if not edits:
            return layout.WATCH_PROGRAM
        program = self._programs.get(edits)
        if program is None:
            program = self._write_program(edits)
            self._programs[edits] = program
        program.users += 1
        return program.index

    def release_program(self, edits: tuple[Edit, ...]) -> None:
        """Ends one use of the program of these edits."""
        if not edits:
            return
        program = self._programs[edits]
        program.users -= 1
        if program.users == 0:
            del self._programs[edits]
            self._edits.release(program.first, len(edits))
            self._free_programs.append(program.index)
            for edit in edits:
                self._bank.release(edit.vector.digest)

    def acquire_group(self, taps: tuple[int, ...]) -> int:
        """The index of the group that captures these taps, in the order of its record.

        Raises:
            SpecError: there is no room.
        """
        if not taps:
            return layout.NO_GROUP
        group = self._groups.get(taps)
        if group is None:
            if not self._free_groups:
                raise SpecError("", self._full("combinations of captures"))
            group = _Group(self._free_groups.pop())
            places = torch.zeros(self._num_taps, dtype=torch.int32)
            places[list(taps)] = torch.arange(1, len(taps) + 1, dtype=torch.int32)
            upload(self._buffers.table[:, group.index, layout.PLACE], places)
            self._groups[taps] = group
        group.users += 1
        return group.index

    def release_group(self, taps: tuple[int, ...]) -> None:
        """Ends one use of the group of these taps."""
        if not taps:
            return
        group = self._groups[taps]
        group.users -= 1
        if group.users == 0:
            del self._groups[taps]
            self._free_groups.append(group.index)

    def check_integrity(self) -> None:
        """With nobody left, everything is free again; cheap, for tests and idle moments."""
        assert all(program.users > 0 for program in self._programs.values())
        assert len(self._free_programs) + len(self._programs) == (
            self._rows - layout.FIRST_FREE_PROGRAM
        )
        assert len(self._free_groups) + len(self._groups) == self._rows - layout.FIRST_FREE_GROUP
        if not self._programs:
            assert self._edits.free == self._edits.size
            assert self._bank.used == 0

    def _write_program(self, edits: tuple[Edit, ...]) -> _Program:
        if not self._free_programs:
            raise SpecError("", self._full("combinations of edits"))
        first = self._edits.acquire(len(edits))
        if first is None:
            raise SpecError(
                "",
                f"{len(edits)} edits do not fit beside those in use: there is room for "
                f"{self._edits.size}; raise the setting `max_edits`",
            )
        rows: list[int] = []
        try:
            for edit in edits:
                rows.append(self._bank.acquire(edit.vector))
        except SpecError:
            for edit in edits[: len(rows)]:
                self._bank.release(edit.vector.digest)
            self._edits.release(first, len(edits))
            raise
        program = _Program(self._free_programs.pop(), edits, first)
        # Sites need not be in order in what a request asks for; a site's edits keep their order.
        order = sorted(range(len(edits)), key=lambda nth: edits[nth].tap)
        ranges = np.zeros((self._num_taps, 2), np.int32)
        for place, nth in enumerate(order):
            tap = edits[nth].tap
            if ranges[tap, 1] == 0:
                ranges[tap, 0] = first + place
            ranges[tap, 1] += 1
        last = first + len(edits)
        buffers = self._buffers
        upload(
            buffers.edit_rows[first:last],
            torch.tensor([rows[nth] for nth in order], dtype=torch.int32),
        )
        upload(
            buffers.edit_scales[first:last],
            torch.tensor([edits[nth].scale for nth in order], dtype=torch.float32),
        )
        columns = slice(layout.EDIT_START, layout.EDIT_COUNT + 1)
        upload(buffers.table[:, program.index, columns], torch.from_numpy(ranges))
        self.edit_counts[program.index] = len(edits)
        return program

    def _full(self, what: str) -> str:
        return (
            f"the running requests use all {self._rows} {what} that there is room for; "
            "raise the setting `programs`"
        )
