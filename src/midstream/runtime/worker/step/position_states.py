"""States of the positions of requests: what midstream did at each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.segments import CACHED, UNSEEN
from midstream.runtime.worker.step.step_plan import StepPlan

T = TypeVar("T", bound=np.generic)
_LONG_RUN = 16  # rows of a run, from which NumPy copies them faster as a slice


class PositionStates:
    """Owner of the states of the requests in all slots; UNSEEN at first."""

    def __init__(self, max_model_len: int) -> None:
        self._reached = np.zeros(0, np.int64)  # number of positions that each request has reached
        self._behind: tuple[Ints, Ints] | None = None  # arguments of the last `advance_by_one`
        self._states = np.zeros((0, max_model_len), np.uint16)
        # The bytes of `_states`. To copy more than 500 values NumPy releases the interpreter's
        # lock; to get it back takes longer than the copy.
        self._bytes = memoryview(b"")

    def grow(self, slots: int) -> None:
        self._reached = grow(self._reached, slots)
        self._states = grow(self._states, slots)
        self._bytes = self._states.data.cast("B")

    def take(self, slots: Sequence[int]) -> list[NDArray[np.uint16]]:
        """Return the states of the positions that requests have reached, and clear their slots."""
        self._catch_up()
        taken = []
        for slot, count in zip(slots, self._reached[slots].tolist(), strict=True):
            states = self._bytes_of(slot, 0, count)
            taken.append(np.frombuffer(bytes(states), np.uint16))
            states[:] = bytes(len(states))  # each is UNSEEN
        self._reached[slots] = 0
        return taken

    def advance(self, slot: Ints, position: Ints, stop: Ints) -> None:
        """Record that requests reach [position, stop); unseen ones before it were cached."""
        self._catch_up()
        reached = self._reached[slot]
        skipped = position > reached
        if skipped.any():
            for index in np.flatnonzero(skipped).tolist():
                states = self._states[slot[index], reached[index] : position[index]]
                states[states == UNSEEN] = CACHED
        self._reached[slot] = np.maximum(reached, stop)

    def advance_by_one(self, slot: Ints, position: Ints) -> None:
        """Record that requests reach one more position, without a look at the array: each call
        replaces the one before until `advance` or `take` is called, and is for the same requests.
        """
        self._behind = slot, position

    def _catch_up(self) -> None:
        if self._behind is not None:
            slot, position = self._behind
            self._behind = None
            self._reached[slot] = np.maximum(self._reached[slot], position + 1)

    def set(self, plan: StepPlan, states: NDArray[np.uint16]) -> None:
        """Set the state of the position of each active row of a step."""
        runs = plan.runs
        if plan.slots.size < _LONG_RUN * runs.slot.size or not runs.exact:
            self._states[plan.slots, plan.positions] = states
            return
        state_bytes, begin = states.astype(np.uint16, copy=False).data.cast("B"), 0
        columns = runs.slot.tolist(), runs.position.tolist(), runs.length.tolist()
        for slot, position, length in zip(*columns, strict=True):
            part = self._bytes_of(slot, position, length)
            part[:] = state_bytes[begin : begin + len(part)]
            begin += len(part)

    def _bytes_of(self, slot: int, position: int, length: int) -> memoryview:
        size, begin = self._states.itemsize, slot * self._states.shape[1] + position
        return self._bytes[begin * size : (begin + length) * size]


def grow(array: NDArray[T], rows: int) -> NDArray[T]:
    # zeros() of a large array takes memory only where it is written.
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: array.shape[0]] = array
    return grown
