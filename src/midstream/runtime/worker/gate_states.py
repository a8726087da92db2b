"""States of gates with memory: which request has which, and its rows in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import NoRoomError
from midstream.ops import layout
from midstream.ops.layout import Op
from midstream.plan import ResolvedProbe
from midstream.plan.positions.ranges import clip
from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.step.step_plan import TokenRuns
from midstream.runtime.worker.tables.device_buffers import Buffers, code, on_device, upload

_FREE = -1


class GateStates:
    """Owner of `Buffers.scans` and `scan_states`, a state of each gate, request and tap. After a
    preemption tokens are read again, but for cached ones, after which the states are kept.
    """

    def __init__(self, buffers: Buffers, only_armed: bool) -> None:
        count = buffers.scans.shape[0]
        self._buffers = buffers
        self.only_armed = only_armed
        self._slots = np.full(count, _FREE, np.int64)  # slot of the request that has each state
        self._armed = np.zeros((count, layout.SCAN_COLUMNS), np.int32)
        self._sent = self._armed.copy()  # what the device has
        self._held = 0  # number of states that requests have
        self._has_rows = False  # whether a state on the device has rows
        self._runs: TokenRuns | None = None  # of which `_armed` has the rows
        # By slot: what is kept of a request's gates, by column, and the state that it is of.
        self._kept: dict[int, list[tuple[int, KeptScore]]] = {}

    def acquire(
        self, slot: int, segments: Iterable[Segment], probes: Iterable[ResolvedProbe]
    ) -> None:
        """Give a request the states that its plan's SCANs need, if any. Pair with `release`."""
        scores = {
            step.slot
            for segment in segments
            for edit in segment.edits
            for step in edit.steps
            if step.op is Op.SCAN and step.slot is not None
        }
        if not scores:
            return
        free = np.flatnonzero(self._slots == _FREE)[: len(scores)]
        if free.size < len(scores):
            raise NoRoomError("", f"no room for {len(scores)} states of gates")
        self._runs = None
        self._slots[free] = slot
        self._held += free.size
        self._armed[free] = [
            (0, 0, 1 + probe.slot, code(probe.tap))
            for probe in probes
            if probe.is_scan and probe.slot in scores
        ]
        states = self._buffers.scan_states
        states.index_fill_(0, on_device(torch.from_numpy(free), states.device), 0)

    def release(self, slot: int) -> None:
        """Take back the states of a request that has ended, if it has any."""
        if not self._held:
            return
        self._kept.pop(slot, None)
        mine = self._slots == slot
        if mine.any():
            self._runs = None
            self._slots[mine] = _FREE
            self._held -= int(mine.sum())

    def __len__(self) -> int:
        return self._held

    def placed(self, slot: int, scores: Sequence[KeptScore]) -> tuple[KeptScore, ...]:
        """Return a request's kept scores with the columns of what its gates remember on this rank;
        without that of gates that another one has.
        """
        count, width = self._slots.size, self._buffers.scores.shape[1]
        placed, kept = [], []
        for score in scores:
            if not score.memory:
                placed.append(score)
                continue
            is_mine = (self._slots == slot) & (self._armed[:, layout.SCAN_SLOT] == 1 + score.slot)
            for state in np.flatnonzero(is_mine).tolist():
                column = width - layout.MEMORY_COLUMNS * (count - state) + score.memory - 1
                score = msgspec.structs.replace(score, slot=column)
                placed.append(score)
                kept.append((state, score))
        if kept:
            self._kept[slot] = kept
        return tuple(placed)

    def restore(
        self, slot: int, cached: int, values_at: Callable[[int], NDArray[np.float32]]
    ) -> None:
        """Let the gates of a request go on from its `cached` tokens; `values_at` returns what is
        kept of one of them, by column.
        """
        entries: dict[int, list[int]] = {}
        for state, score in self._kept.get(slot, ()):
            read = clip(score.ranges, cached)
            if not read:
                continue
            last = read[-1][1] - 1
            bits = int(values_at(last)[score.slot : score.slot + 1].view(np.int32)[0])
            entry = entries.setdefault(state, [0] * layout.STATE_COLUMNS)
            entry[layout.STATE_POSITION] = 1 + last
            entry[layout.STATE_SCORE if score.memory == 1 else layout.STATE_LEFT] = bits
        states = self._buffers.scan_states
        for state, entry in entries.items():
            values = torch.zeros(states.shape[1:], dtype=states.dtype)
            values[0] = torch.tensor(entry, dtype=states.dtype)
            states[state].copy_(on_device(values, states.device), non_blocking=True)

    def arm(self, runs: TokenRuns) -> None:
        """Set which rows of the step that is queued next each state's request has."""
        last = self._runs
        if last is not None and runs.has_rows_of(last):
            return
        if not self._held:
            self._clear()
            return
        size = 1 + max(int(runs.slot.max()), int(self._slots.max()))
        first, stop = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
        np.minimum.at(first, runs.slot, runs.row)
        np.maximum.at(stop, runs.slot, runs.row + runs.length)
        # Of a state that is free, `_FREE` reads some row, and none is counted.
        is_here = (self._slots != _FREE) & (stop[self._slots] > 0)
        self._armed[:, layout.SCAN_ROW] = np.where(is_here, first[self._slots], 0)
        rows = np.where(is_here, stop[self._slots] - first[self._slots], 0)
        self._armed[:, layout.SCAN_COUNT] = rows
        self._runs = runs
        if not np.array_equal(self._armed, self._sent):
            self._sent = self._armed.copy()
            self._has_rows = bool(rows.any())
            upload(self._buffers.scans, torch.from_numpy(self._sent))

    def disarm(self) -> None:
        """Let no forward pass change a state before the next step is armed."""
        if not self.only_armed:
            self._clear()

    def _clear(self) -> None:
        self._runs = None
        if self._has_rows:
            self._has_rows = False
            self._armed[:, layout.SCAN_COUNT] = 0
            self._sent = np.zeros_like(self._armed)
            self._buffers.scans.zero_()

    def check_integrity(self) -> None:
        """Check that the device has what was armed; nothing is, where unarmed passes fire taps."""
        assert np.array_equal(self._buffers.scans.cpu().numpy(), self._sent)
        assert self._has_rows == bool(self._sent[:, layout.SCAN_COUNT].any())
        assert self.only_armed or not self._has_rows
        assert self._held == (self._slots != _FREE).sum()
