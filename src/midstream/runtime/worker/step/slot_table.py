"""Requests with a plan, each in a slot: one row of arrays that a step reads for all requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.segments import APPLIED_0, MOST_APPLIED, NONFINITE
from midstream.runtime.worker.request_state import RequestState, Segment
from midstream.runtime.worker.step import columns
from midstream.runtime.worker.step.doses import Doses
from midstream.runtime.worker.step.position_states import PositionStates, grow
from midstream.runtime.worker.step.step_plan import StepPlan, TokenRuns

_FIRST_SIZE = 64


class SlotTable:
    """Owner of the requests with a plan whose steps are not all settled."""

    def __init__(
        self, max_model_len: int, on_nonfinite: str = "raise", doses: Doses | None = None
    ) -> None:
        self._ends_nonfinite = on_nonfinite == "raise"
        self.doses = Doses(0) if doses is None else doses
        self.segments = np.zeros((0, columns.SEGMENT_COLUMNS), np.int64)  # each one's latest
        self.failures: dict[str, Failure] = {}  # not reported yet, by vLLM's id
        self.incomplete = np.zeros(0, np.bool_)  # rows of it were dropped
        self.plans = np.zeros(0, np.int64)  # see `RankPlan`; 0: another version, or none
        self.last_step = np.zeros(0, np.int64)  # number of its last step with a row; 0: none
        self.reports = np.zeros(0, np.bool_)  # scores leave with each step's output
        self.num_reporting = 0
        self.has_dropped = False  # rows of some request, ever
        self.nonfinite: set[str] = set()  # vLLM's ids of running requests with such a value
        self.states = PositionStates(max_model_len)
        self._requests: dict[str, RequestState] = {}
        self._slot_of: dict[str, int] = {}
        self._by_slot: list[RequestState | None] = []
        self._free: list[int] = []
        self._serials = np.zeros(0, np.int64)
        self._latest: tuple[list[str], Ints] | None = None  # result of the last `slots_of`

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> RequestState | None:
        """Return the request with vLLM's id `request_id`; None if it has no plan or was removed."""
        return self._requests.get(request_id)

    def all(self) -> Iterable[RequestState]:
        return self._requests.values()

    def by_slot(self, slot: int) -> RequestState | None:
        return self._by_slot[slot]

    def ids_of(self, slots: Ints) -> list[str]:
        """Return vLLM's ids of the requests in some slots."""
        requests = [self._by_slot[slot] for slot in slots.tolist()]
        return [request.id for request in requests if request is not None]

    def serials(self, slots: Ints) -> Ints:
        """Return the serial numbers of the requests in some slots."""
        return self._serials[slots]

    def new_slot(self) -> int:
        """Return a free slot; the arrays grow as needed."""
        if not self._free:
            size = len(self._by_slot)
            grown = max(_FIRST_SIZE, 2 * size)
            self.segments = grow(self.segments, grown)
            self.incomplete = grow(self.incomplete, grown)
            self.plans = grow(self.plans, grown)
            self.last_step = grow(self.last_step, grown)
            self.reports = grow(self.reports, grown)
            self._serials = grow(self._serials, grown)
            self.states.grow(grown)
            self.doses.grow(grown)
            self._by_slot += [None] * (grown - size)
            self._free = list(range(grown - 1, size - 1, -1))
        return self._free.pop()

    def add(self, request: RequestState) -> None:
        """Add a request whose slot is from `new_slot`."""
        slot = request.slot
        self._latest = None
        self._requests[request.id] = request
        self._slot_of[request.id] = slot
        self._by_slot[slot] = request
        self.enter(slot, request.segments[0])
        self.incomplete[slot] = False
        self.plans[slot] = 0 if request.shared is None else request.shared.number
        self.last_step[slot] = 0
        self.reports[slot] = request.reports
        self.num_reporting += request.reports
        self._serials[slot] = request.serial

    def retire(self, request: RequestState) -> None:
        """Record that a request has no more rows: later rows of its id are another request's."""
        self._latest = None
        if self.runs(request):
            del self._slot_of[request.id]
            self.failures.pop(request.id, None)

    def runs(self, request: RequestState) -> bool:
        """Return whether a request may have more rows."""
        return self._slot_of.get(request.id) == request.slot

    def remove(self, requests: Sequence[RequestState]) -> None:
        """Remove requests and free their slots; states and doses move to the requests."""
        slots = [request.slot for request in requests]
        taken = zip(requests, self.states.take(slots), self.doses.take(slots), strict=True)
        for request, states, doses in taken:
            request.done, request.doses = states, doses
            self.retire(request)
            if self._requests.get(request.id) is request:
                del self._requests[request.id]
            self._by_slot[request.slot] = None
            self.num_reporting -= request.reports
            self._free.append(request.slot)

    def fail(self, request: RequestState, position: int, problem: str) -> None:
        """Record a request's first problem, and the first position that it may concern."""
        request.problem = problem
        if self.runs(request):
            self.failures[request.id] = Failure(position, problem)

    def drop(self, runs: TokenRuns, chosen: Ints) -> None:
        """Count the captured rows of some runs of a step as dropped."""
        self.has_dropped = self.incomplete[runs.slot[chosen]] = True
        columns = np.array((runs.slot, runs.length, runs.position))[:, chosen]
        for slot, count, first in columns.T.tolist():
            request = self._by_slot[slot]
            assert request is not None
            (segment,) = request.segments_within(first, first + 1)
            request.dropped += count * segment.returned

    def slots_of(self, request_ids: Sequence[str]) -> Ints:
        """Return requests' slots, −1 for none; the same array as long as requests are the same."""
        if self._latest is None or self._latest[0] != request_ids:
            find = self._slot_of.get
            slots = np.fromiter((find(name, -1) for name in request_ids), np.int64)
            self._latest = (list(request_ids), slots)
        return self._latest[1]

    def enter(self, slot: int, segment: Segment) -> None:
        """Set the segment of a slot's latest rows."""
        self.segments[slot] = (segment.start, segment.stop, *segment.content)

    def change(self, changed: Sequence[tuple[int, Segment]]) -> None:
        """Record new segments of slots: no step repeats an earlier one."""
        if changed:
            self._latest = None
            last = dict(changed)
            self.plans[list(last)] = 0
            self.segments[list(last)] = [
                (segment.start, segment.stop, *segment.content) for segment in last.values()
            ]

    def record(self, plan: StepPlan, edits: Ints, nonfinite: NDArray[np.bool_]) -> None:
        """Record each active row's edits, and a value not finite, which may end its request."""
        states = np.minimum(APPLIED_0 + edits, MOST_APPLIED)
        if nonfinite.any():
            states |= np.where(nonfinite, NONFINITE, 0)
            for row in np.flatnonzero(nonfinite).tolist():
                request = self._by_slot[int(plan.slots[row])]
                if request is not None:
                    self._add_nonfinite(request, int(plan.positions[row]))
        self.states.set(plan, states)

    def _add_nonfinite(self, request: RequestState, position: int) -> None:
        if request.problem or request.nonfinite:
            return
        request.nonfinite = True
        if self.runs(request):
            self.nonfinite.add(request.id)
        problem = (
            f"position {position}: a value is not finite, or an edit went beyond the largest that "
            "is written; use a smaller scale"
        )
        if self._ends_nonfinite:
            self.fail(request, position, problem)
        elif self.runs(request):
            self.failures[request.id] = Failure(position, problem, ends=False)
