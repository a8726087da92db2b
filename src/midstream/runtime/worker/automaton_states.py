"""States of the automata of requests, which select tokens to edit by the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from midstream.ops import layout
from midstream.plan.positions.automaton import Automaton
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import TokenRuns
from midstream.runtime.worker.tables.device_buffers import Buffers, on_device

_FIRST_SIZE = 64
_ID_BITS = 32


class _Tables:
    """Automata on the device, each as often as requests need it; a number is the index of each.

    One that is added changes its own entries alone: requests with other marks may be many.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[Automaton, int] = {}  # all from position 0
        self._users: list[int] = []  # requests that need an automaton, by its number
        self._free: list[int] = []  # numbers
        # By number: number << 32 | token id of each id, ascending, and its kind.
        self._ids: dict[int, tuple[Ints, Ints]] = {}
        self.keys = torch.tensor([-1], device=device)  # int64, of all in use, ascending
        self.kinds = torch.zeros(1, dtype=torch.int64, device=device)  # of each key
        self.moves = torch.zeros(
            0, 0, 0, dtype=torch.int16, device=device
        )  # by number, kind, state
        self.selects = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [numbers, states]

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, automata: Sequence[Automaton]) -> list[int]:
        """Return the number of each. Pair with `remove`."""
        contents = [_content(automaton) for automaton in automata]
        new = [one for one in dict.fromkeys(contents) if one not in self._numbers]
        if new:
            numbers = self._numbers_for(new)
            for automaton, number in zip(new, numbers, strict=True):
                self._write(number, automaton)
            ids = {**self._ids, **dict(zip(numbers, map(_keys, numbers, new), strict=True))}
            keys, kinds = zip(([-1], [0]), *(ids[number] for number in sorted(ids)), strict=True)
            tables = [torch.from_numpy(np.concatenate(parts)) for parts in (keys, kinds)]
            self.keys, self.kinds = (on_device(table, self._device) for table in tables)
            # Last: where the device has no memory left, nothing is changed.
            self._ids = ids
            self._numbers.update(zip(new, numbers, strict=True))
            self._free = [number for number in self._free if number not in ids]
            self._users += [0] * (len(ids) + len(self._free) - len(self._users))
        for content in contents:
            self._users[self._numbers[content]] += 1
        return [self._numbers[content] for content in contents]

    def remove(self, automata: Sequence[Automaton]) -> None:
        for content in map(_content, automata):
            number = self._numbers[content]
            self._users[number] -= 1
            if not self._users[number]:
                del self._numbers[content], self._ids[number]
                self._free.append(number)

    def _numbers_for(self, automata: Sequence[Automaton]) -> list[int]:
        """Return free numbers, and let the tables have entries for these."""
        more = range(len(self._users), len(self._users) + len(automata))
        numbers = [*self._free, *more][: len(automata)]
        size, num_kinds, num_states = self.moves.shape
        if max(numbers) >= size:
            size = max(2 * size, 1 + max(numbers), 16)
        num_kinds = max(num_kinds, *(len(automaton.moves[0]) for automaton in automata))
        num_states = max(num_states, *(len(automaton.moves) for automaton in automata))
        if self.moves.shape != (size, num_kinds, num_states):
            moves = self.moves.new_zeros(size, num_kinds, num_states)
            selects = self.selects.new_zeros(size, num_states)
            known, kinds, states = self.moves.shape
            moves[:known, :kinds, :states] = self.moves
            selects[:known, :states] = self.selects
            self.moves, self.selects = moves, selects
        return numbers

    def _write(self, number: int, automaton: Automaton) -> None:
        moves = torch.tensor(automaton.moves, dtype=torch.int16).T.contiguous()
        selects = torch.tensor(automaton.selects, dtype=torch.int64)
        kinds, states = moves.shape
        self.moves[number, :kinds, :states] = on_device(moves, self._device)
        self.selects[number, :states] = on_device(selects, self._device)


class _Rows(NamedTuple):
    """The rows of a step that automata read; those of one automaton of a request are neighbours."""

    runs: TokenRuns
    run: Ints  # of `runs`, that has the first row of each automaton
    skipped: Ints  # rows of that run before it, which are of the prompt
    first: Tensor  # int64, the first row of each
    automaton: Tensor  # int64 [2, automata]: start, row of the states
    # int64 [5, rows]: row, column of `automaton`, place among its rows, its number, its bit
    places: Tensor
    kept: Tensor  # int64, columns of `places` of the last rows of each, whose states are kept
    longest: int  # most rows of one automaton


class AutomatonStates:
    """Owner of the bits in `Buffers.ids`. The state after each of the last positions is kept, as a
    draft token may be rejected; a preemption needs nothing, as all generated tokens are read again.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._ids = buffers.ids
        self._states = torch.zeros(
            _FIRST_SIZE, buffers.scan_states.shape[1], dtype=torch.int64, device=self._ids.device
        )
        self._free = list(range(_FIRST_SIZE))  # rows of `_states`
        # By slot of the request, its automata in the order of their bits, and row and number of
        # each.
        self._held: dict[int, tuple[Sequence[Automaton], list[int], list[int]]] = {}
        self._tables = _Tables(self._ids.device)
        self._rows: _Rows | None = None  # of the last step

    def __len__(self) -> int:
        return len(self._held)

    def acquire(self, slot: int, automata: Sequence[Automaton]) -> None:
        """Give a request the states of its automata. Pair with `release`."""
        while len(self._free) < len(automata):
            size = len(self._states)
            self._states = torch.cat([self._states, torch.zeros_like(self._states)])
            self._free += range(size, 2 * size)
        numbers = self._tables.add(automata)
        self._held[slot] = automata, [self._free.pop() for _ in automata], numbers
        self._rows = None

    def release(self, slot: int) -> None:
        """Take back the states of a request that has ended, if it has any."""
        automata, rows, _ = self._held.pop(slot, ((), [], []))
        self._tables.remove(automata)
        self._free += rows
        self._rows = None

    def arm(self, runs: TokenRuns, batch: StepBatch) -> None:
        """Let the automata read the tokens of the step that is queued next, and set their bits."""
        if not self._held:
            return
        rows = self._rows
        if rows is None or not runs.has_rows_of(rows.runs):
            rows = self._rows = self._lay_out(runs)
        if not rows.longest:
            return
        tables = self._tables
        row, column, place, number, bit = rows.places
        start, state_row = rows.automaton
        if runs.exact or batch.unknown is None:
            positions = torch.from_numpy(runs.position[rows.run] + rows.skipped)
            position = on_device(positions, self._ids.device)
        else:
            position = batch.unknown.positions()[rows.first].long()
        kept = self._states.shape[1]
        before = self._states[state_row, (position - 1) % kept]
        before = torch.where(position > start, before, 0)
        keys = (number << _ID_BITS) + batch.token_ids()[row]
        at = torch.searchsorted(tables.keys, keys).clamp_(max=len(tables.keys) - 1)
        kinds = torch.where(tables.keys[at] == keys, tables.kinds[at], 0)
        after = _composed(tables.moves[number, kinds].long(), place, rows.longest)
        state = after.gather(1, before[column, None])[:, 0]
        last, of = rows.kept, column[rows.kept]
        self._states[state_row[of], (position[of] + place[last]) % kept] = state[last]
        bits = tables.selects[number, state] << bit
        selected = self._ids[: batch.num_tokens, layout.SELECTED]
        selected.zero_().index_add_(0, row, bits.to(torch.int32))

    def _lay_out(self, runs: TokenRuns) -> _Rows:
        """Return the rows of a step's generated tokens, by automaton."""
        # Of each slot: row, run, rows of that run before it, and number of its generated tokens.
        spans: dict[int, tuple[int, int, int, int]] = {}
        columns = np.array((runs.slot, runs.position, runs.row, runs.length)).T
        for run, (slot, position, row, length) in enumerate(columns.tolist()):
            if slot not in self._held:
                continue
            skipped = max(0, self._held[slot][0][0].start - position)
            if skipped < length:
                # Runs of a request are neighbours, in any order.
                *known, count = spans.get(slot, (row + skipped, run, skipped, 0))
                first_row, first_run, before = min(known, [row + skipped, run, skipped])
                spans[slot] = (first_row, first_run, before, count + length - skipped)
        automata: list[tuple[int, int]] = []
        firsts: list[tuple[int, int, int]] = []
        places: list[tuple[int, int, int, int, int]] = []
        kept: list[int] = []
        for slot, (row, run, skipped, count) in spans.items():
            for bit, (automaton, state_row, number) in enumerate(
                zip(*self._held[slot], strict=True)
            ):
                column = len(automata)
                first = len(places) + max(0, count - self._states.shape[1])
                kept += range(first, len(places) + count)
                places += [(row + place, column, place, number, bit) for place in range(count)]
                automata.append((automaton.start, state_row))
                firsts.append((row, run, skipped))
        first_rows, first_runs, skips = np.array(firsts, np.int64).reshape(-1, 3).T
        tables = (
            first_rows,
            np.array(automata, np.int64).reshape(-1, 2).T,
            np.array(places, np.int64).reshape(-1, 5).T,
            np.array(kept, np.int64),
        )
        device = self._ids.device
        sent = [on_device(torch.from_numpy(table.copy()), device) for table in tables]
        longest = max((count for _, _, _, count in spans.values()), default=0)
        return _Rows(runs, first_runs, skips, sent[0], sent[1], sent[2], sent[3], longest)

    def check_integrity(self) -> None:
        """Check that each row of the states is free, or that of one automaton of a request."""
        used = [row for _, rows, _ in self._held.values() for row in rows]
        assert sorted([*self._free, *used]) == list(range(len(self._states)))
        assert self._held or not len(self._tables)


def _content(automaton: Automaton) -> Automaton:
    """Return the automaton as it is shared by requests with prompts of different lengths."""
    return Automaton(0, automaton.ids, automaton.kinds, automaton.moves, automaton.selects)


def _keys(number: int, automaton: Automaton) -> tuple[Ints, Ints]:
    """Return the keys of an automaton's ids, and their kinds."""
    ids = np.array(automaton.ids, np.int64)
    return (number << _ID_BITS) + ids, np.array(automaton.kinds, np.int64)


def _composed(moves: Tensor, place: Tensor, longest: int) -> Tensor:
    """Return the state after each token, by the state before its automaton's first one.

    `moves`, [rows, states], are those of each token alone, `place` is its place among those of its
    automaton, of which there are at most `longest`.
    """
    reach = 1
    while reach < longest:
        earlier = moves.roll(reach, 0)
        moves = torch.where((place >= reach)[:, None], moves.gather(1, earlier), moves)
        reach *= 2
    return moves
