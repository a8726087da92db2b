"""Programs (which edits) and groups (which captures): interned, counted, written to the device.

Many requests ask for the same; a token names what it asks for by one small integer, and the cost
of a step does not depend on how many different ones are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import NoRoomError
from midstream.ops import layout
from midstream.ops.layout import Flags
from midstream.runtime.protocol.segments import Edits, TapProgramStep, vectors_of
from midstream.runtime.worker.tables.device_buffers import Buffers, scatter, upload
from midstream.runtime.worker.tables.range_pool import Pool, RangeAllocator
from midstream.spec import Vector


@dataclass(slots=True)
class _Program:
    index: int
    first: int
    length: int
    users: int = 0


@dataclass(slots=True)
class _Group:
    index: int
    users: int = 0


class ProgramTable:
    """Owner of `Buffers.table`, `instructions`, `params`, `lists` and `bank`."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._num_taps, self._rows, _ = buffers.table.shape
        self._bank = Pool(buffers.bank.shape[0])
        self._lists = Pool(buffers.lists.shape[0])
        self._instructions = RangeAllocator(buffers.instructions.shape[0])
        self._programs: dict[Edits, _Program] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._free_programs = list(range(self._rows - 1, layout.FIRST_FREE_PROGRAM - 1, -1))
        self._free_groups = list(range(self._rows - 1, layout.FIRST_FREE_GROUP - 1, -1))
        # By program, what the tally of one token gains in one forward: at least, and at most
        # (the difference is in edits that depend on the token's id).
        self.fewest = np.zeros(self._rows, np.int32)
        self.most = np.zeros(self._rows, np.int32)
        # Whether a program reads the token's position, and its id.
        self.by_position = np.zeros(self._rows, np.bool_)
        self.by_id = np.zeros(self._rows, np.bool_)

    def acquire_program(self, edits: Edits) -> int:
        """The index of the program of these edits, in this order. Pair with `release_program`.

        Raises:
            NoRoomError: there is no room; the message names the setting.
        """
        if not edits:
            return layout.WATCH_PROGRAM
        program = self._programs.get(edits)
        if program is None:
            program = self._write_program(edits)
            self._programs[edits] = program
        program.users += 1
        return program.index

    def release_program(self, edits: Edits) -> None:
        """Ends one use of the program of these edits."""
        if not edits:
            return
        program = self._programs[edits]
        program.users -= 1
        if program.users == 0:
            del self._programs[edits]
            self._instructions.release(program.first, program.length)
            self._free_programs.append(program.index)
            self._release_content(edits)

    def edits_of(self, index: int) -> Edits:
        """Those of a program in use. Looks through all of them."""
        found = [edits for edits, program in self._programs.items() if program.index == index]
        return found[0] if found else ()

    def acquire_group(self, taps: tuple[int, ...]) -> int:
        """The index of the group that captures these taps, in the order of its record.

        Raises:
            NoRoomError: there is no room.
        """
        if not taps:
            return layout.NO_GROUP
        group = self._groups.get(taps)
        if group is None:
            if not self._free_groups:
                raise NoRoomError("", self._full("combinations of captures"))
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
            assert self._instructions.free == self._instructions.size
            assert self._bank.used == 0
            assert self._lists.used == 0

    # -- inside -----------------------------------------------------------------------------

    def _write_program(self, edits: Edits) -> _Program:
        if not self._free_programs:
            raise NoRoomError("", self._full("combinations of edits"))
        index = self._free_programs[-1]
        try:
            program = self._place(edits, index)
        except NoRoomError:
            # What is free may only be scattered: everything is laid out anew, without gaps.
            self._compact()
            program = self._place(edits, index)
        self._free_programs.pop()
        return program

    def _compact(self) -> None:
        """Lays out the programs in use from the start of every buffer. Steps already queued are
        not disturbed: what is written here is queued behind them.
        """
        self._bank = Pool(self._bank.size)
        self._lists = Pool(self._lists.size)
        self._instructions = RangeAllocator(self._instructions.size)
        for edits, program in self._programs.items():
            moved = self._place(edits, program.index)
            program.first = moved.first

    def _place(self, edits: Edits, index: int) -> _Program:
        """Writes a program; all or nothing.

        Raises:
            NoRoomError: it does not fit as things lie.
        """
        # Sites need not be in order in what a request asks for; a site's edits keep their order.
        ordered = sorted(edits, key=lambda edit: edit.tap)
        length = sum(len(edit.steps) for edit in ordered)
        first = self._instructions.acquire(length)
        if first is None:
            raise NoRoomError(
                "",
                f"{length} instructions do not fit beside those in use: there is room for "
                f"{self._instructions.size}; raise the setting `max_edits`",
            )
        try:
            words, numbers = self._encode(ordered)
        except NoRoomError:
            self._instructions.release(first, length)
            raise
        ranges = np.zeros((self._num_taps, layout.TABLE_COLUMNS), np.int32)
        place = first
        for edit in ordered:
            row = ranges[edit.tap]
            if row[layout.EDIT_COUNT] == 0:
                row[layout.EDIT_START] = place
            row[layout.EDIT_COUNT] += len(edit.steps)
            row[layout.READS] |= any(step.reads for step in edit.steps)
            place += len(edit.steps)
        buffers = self._buffers
        upload(buffers.instructions[first:place], torch.from_numpy(words))
        upload(buffers.params[first:place], torch.from_numpy(numbers))
        # The row is shared with a group of the same index, whose column stays as it is.
        columns = slice(layout.EDIT_START, layout.EDIT_COUNT + 1)
        upload(buffers.table[:, index, columns], torch.from_numpy(ranges[:, columns].copy()))
        reads = torch.from_numpy(ranges[:, layout.READS].copy())
        upload(buffers.table[:, index, layout.READS], reads)
        self._note(edits, index)
        return _Program(index, first, length)

    def _note(self, edits: Edits, index: int) -> None:
        self.fewest[index] = sum(edit.counted for edit in edits if not edit.ids)
        self.most[index] = sum(edit.counted for edit in edits)
        self.by_id[index] = any(edit.ids for edit in edits)
        self.by_position[index] = any(
            Flags.ROW_BY_POSITION in step.flags for edit in edits for step in edit.steps
        )

    def _encode(
        self, ordered: list[TapProgramStep]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The instructions' words and params, their vectors and lists placed."""
        words: list[list[int]] = []
        numbers: list[tuple[float, ...]] = []
        new_rows: list[int] = []
        new_vectors: list[Vector] = []
        done: list[tuple[Pool, object]] = []

        def rows(vectors: tuple[Vector, ...]) -> int:
            found = self._bank.acquire(vectors, len(vectors))
            if found is None:
                raise NoRoomError(
                    "",
                    f"{len(vectors)} rows do not fit beside those in use: the vector bank has "
                    f"{self._bank.size}; raise the setting `bank_rows`, or run fewer vectors at "
                    "once",
                )
            done.append((self._bank, vectors))
            start, is_new = found
            if is_new:
                new_rows.extend(range(start, start + len(vectors)))
                new_vectors.extend(vectors)
            return start

        try:
            for edit in ordered:
                start = 0
                if edit.ids:
                    start = self._place_ids(edit.ids)
                    done.append((self._lists, edit.ids))
                for step in edit.steps:
                    flags = step.flags | (Flags.OTHER_IDS if edit.others else Flags.NONE)
                    read = 0 if step.read is None else rows((step.read,))
                    write = rows(step.write) if step.write else 0
                    if Flags.ROW_BY_POSITION in flags:
                        write -= step.first
                    slot = 0 if step.slot is None else 1 + step.slot
                    words.append(
                        [int(step.op), read, write, slot, int(flags), start, len(edit.ids), 0]
                    )
                    numbers.append((step.a, step.b, step.c, step.d))
        except NoRoomError:
            for pool, key in done:
                pool.release(key)
            raise
        if new_vectors:
            data = bytearray(b"".join(vector.data for vector in new_vectors))
            values = torch.frombuffer(data, dtype=torch.float32).view(len(new_vectors), -1)
            scatter(self._buffers.bank, new_rows, values)
        return np.array(words, np.int32), np.array(numbers, np.float32)

    def _place_ids(self, ids: tuple[int, ...]) -> int:
        found = self._lists.acquire(ids, len(ids))
        if found is None:
            raise NoRoomError(
                "",
                f"{len(ids)} token ids do not fit beside those in use: there is room for "
                f"{self._lists.size}; raise the setting `token_ids`",
            )
        start, is_new = found
        if is_new:
            upload(
                self._buffers.lists[start : start + len(ids)], torch.tensor(ids, dtype=torch.int32)
            )
        return start

    def _release_content(self, edits: Edits) -> None:
        for edit in edits:
            if edit.ids:
                self._lists.release(edit.ids)
            for step in edit.steps:
                for vectors in vectors_of(step):
                    self._bank.release(vectors)

    def _full(self, what: str) -> str:
        return (
            f"the running requests use all {self._rows} {what} that there is room for; "
            "raise the setting `programs`"
        )
