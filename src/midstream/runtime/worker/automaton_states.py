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


class _Tables(NamedTuple):
    """Automata on the device; the number of each is its index in `moves`."""

    keys: Tensor  # int64, ascending: number << 32 | token id
    kinds: Tensor  # int64, of each key
    moves: Tensor  # int64 [automata, kinds, states]
    selects: Tensor  # int64 [automata, states], 1 or 0


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
        # By slot of the request, its automata in the order of their bits, and the row of each.
        self._held: dict[int, tuple[Sequence[Automaton], list[int]]] = {}
        self._numbers: dict[Automaton, int] = {}  # of those in `_tables`, all from position 0
        self._tables: _Tables | None = None
        self._rows: _Rows | None = None  # of the last step

    def __len__(self) -> int:
        return len(self._held)

    def acquire(self, slot: int, automata: Sequence[Automaton]) -> None:
        """Give a request the states of its automata. Pair with `release`."""
        while len(self._free) < len(automata):
            size = len(self._states)
            self._states = torch.cat([self._states, torch.zeros_like(self._states)])
            self._free += range(size, 2 * size)
        self._held[slot] = automata, [self._free.pop() for _ in automata]
        self._rows = None
        if any(_content(automaton) not in self._numbers for automaton in automata):
            contents = (_content(one) for mine, _ in self._held.values() for one in mine)
            self._numbers = {one: index for index, one in enumerate(dict.fromkeys(contents))}
            self._tables = _tables(list(self._numbers), self._ids.device)

    def release(self, slot: int) -> None:
        """Take back the states of a request that has ended, if it has any."""
        _, rows = self._held.pop(slot, ((), []))
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
        assert tables is not None
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
        after = _composed(tables.moves[number, kinds], place, rows.longest)
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
            for bit, (automaton, state_row) in enumerate(zip(*self._held[slot], strict=True)):
                number, column = self._numbers[_content(automaton)], len(automata)
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
        used = [row for _, rows in self._held.values() for row in rows]
        assert sorted([*self._free, *used]) == list(range(len(self._states)))


def _content(automaton: Automaton) -> Automaton:
    """Return the automaton as it is shared by requests with prompts of different lengths."""
    return Automaton(0, automaton.ids, automaton.kinds, automaton.moves, automaton.selects)


def _tables(automata: Sequence[Automaton], device: torch.device) -> _Tables:
    keys, kinds = [-1], [0]
    num_kinds = max(len(automaton.moves[0]) for automaton in automata)
    num_states = max(len(automaton.moves) for automaton in automata)
    moves = torch.zeros(len(automata), num_kinds, num_states, dtype=torch.int64)
    selects = torch.zeros(len(automata), num_states, dtype=torch.int64)
    for number, automaton in enumerate(automata):
        keys += [(number << _ID_BITS) + token for token in automaton.ids]
        kinds += automaton.kinds
        table = torch.tensor(automaton.moves).T
        moves[number, : table.shape[0], : table.shape[1]] = table
        selects[number, : len(automaton.selects)] = torch.tensor(automaton.selects)
    tensors = torch.tensor(keys), torch.tensor(kinds), moves, selects
    return _Tables(*(on_device(tensor, device) for tensor in tensors))


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
