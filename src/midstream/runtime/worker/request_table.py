"""Requests with a plan on a worker, from their first step until their results are collected."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from midstream.plan import ResolvedPlan
from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.plan_version import PlanChange
from midstream.runtime.protocol.rank_parts import SplitScore
from midstream.runtime.worker.logit_bias import BiasesAt
from midstream.runtime.worker.rank_agreement import RankLinks, is_joint
from midstream.runtime.worker.request_resources import RequestResources
from midstream.runtime.worker.request_state import (
    FunctionUse,
    PlacedVersion,
    RequestState,
    Segment,
)
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.weight_states import WeightStates
from midstream.runtime.worker.step_recorder import StepRecorder

_LOGGER = logging.getLogger(__name__)
_NO_PLAN = ResolvedPlan(0, (), ())  # of a request whose plan cannot be read


class RequestTable:
    """Owner of finished requests; `resets` counts resets of the prefix cache if rows are kept."""

    def __init__(
        self,
        slots: SlotTable,
        resources: RequestResources,
        recorder: StepRecorder,
        links: RankLinks,
    ) -> None:
        self.plans = resources.plans
        self.resets = 0
        self.weights = WeightStates()
        self._slots = slots
        self._recorder = recorder
        self._checksum = links.checksum
        self._agree = links.agree
        self._resources = resources
        self._added = 0
        # Finished requests with the number of their last step, which is not settled.
        self._finishing: list[tuple[int, RequestState]] = []
        # Changed plans of requests that were not scheduled yet, by vLLM's request id.
        self._early: dict[str, list[PlanChange]] = {}
        # Finished requests whose steps are settled, by uid.
        self._finished: dict[str, list[RequestState]] = {}

    def add(
        self,
        request_id: str,
        uid: str,
        plan: bytes,
        computed: int = 0,
        reports: bool = False,
        split: tuple[SplitScore, ...] = (),
    ) -> None:
        """Add a request about to run, maybe again; an exception in here fails this one alone."""
        if self._checksum is not None:
            self._checksum.add_request(request_id, uid, plan, computed)
        known = self._slots.get(request_id)
        if known is not None:
            if known.uid == uid:
                return
            # The id was used before, and that request is not settled.
            self.settle_requests([known])
        problem = ""
        own = None
        functions: list[FunctionUse] = []
        slot = self._slots.new_slot()
        try:
            own, functions = self._resources.acquire(plan, slot, uid)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            _LOGGER.exception("midstream failed request %s", request_id)
        agree = self._agree if split or (self._agree is not None and is_joint(plan)) else None
        if agree is not None and not agree(not problem):
            if own is not None:
                self._resources.release(own, slot)
                own = None
            problem = problem or "another rank cannot run the plan"
        self._added += 1
        request = RequestState(
            id=request_id,
            uid=uid,
            plan=_NO_PLAN if own is None else own.resolved,
            slot=slot,
            segments=self.plans.without_work(plan) if own is None else own.segments,
            reports=reports,
            split=split,
            shared=own,
            serial=self._added,
            oldest_step=self._recorder.rows.next_step,
            resets=self.resets,
            first_step=self._recorder.counts.steps + 1,
            functions=functions,
        )
        self._slots.add(request)
        if problem:
            self._slots.fail(request, computed, problem)
        early = self._early.pop(request_id, None)
        if early is not None:
            self.change(early)

    def change(self, changes: Iterable[PlanChange]) -> None:
        """Let requests have other versions of their plans; an exception fails the request alone."""
        self._slots.change(
            [changed for change in changes if (changed := self._change(change)) is not None]
        )

    def _change(self, change: PlanChange) -> tuple[int, Segment] | None:
        """Return the slot and the segment there; None: the request was not scheduled yet."""
        request = self._slots.get(change.request_id)
        if request is None or request.uid != change.uid or not self._slots.runs(request):
            self._early.setdefault(change.request_id, []).append(change)
            return None
        if self._checksum is not None:
            self._checksum.add_request(change.request_id, change.uid, change.plan, change.position)
        problem, plan = "", None
        try:
            # Sums of reduced rows are those of the captures, which are the same.
            plan = self.plans.acquire(change.plan)
        except Exception as error:
            problem = f"version {change.number} of its plan: {type(error).__name__}: {error}"
            _LOGGER.exception("midstream failed request %s", change.request_id)
        if self._agree is not None and is_joint(change.plan) and not self._agree(not problem):
            if plan is not None:
                self.plans.release(plan)
            problem, plan = problem or "another rank cannot run the plan", None
        segments = self.plans.without_work(change.plan) if plan is None else plan.segments
        segment = request.change(PlacedVersion(change.number, change.position, plan), segments)
        self._slots.doses.change(request.slot, change.number, change.position)
        if problem and not request.problem:
            self._slots.fail(request, change.position, problem)
        return request.slot, segment

    def grow(self, request_id: str, uid: str, prompt: Sequence[int] | None) -> None:
        """Record the prompt of a request that is scheduled as new again (grown, or preempted)."""
        known = self._slots.get(request_id)
        if known is not None and known.uid == uid:
            known.prompt = list(prompt or ())
            known.turns.append(len(known.prompt))

    def finish(self, request_ids: Iterable[str]) -> None:
        """End requests, which have no more rows. Ids of requests without a plan are ignored."""
        ended = []
        for request_id in request_ids:
            if self._early:
                self._early.pop(request_id, None)
            request = self._slots.get(request_id)
            if request is None or not self._slots.runs(request):
                continue
            if request.shared is not None:
                self._resources.release(request.shared, request.slot)
            for later in request.later:
                if later.plan is not None:
                    self.plans.release(later.plan)
            self._slots.retire(request)
            steps = self._recorder.counts.steps
            request.weights = self.weights.of_steps(request.first_step, steps)
            ended.append(request)
        if ended:
            last = self._slots.last_step[[request.slot for request in ended]]
            self._finishing += zip(last.tolist(), ended, strict=True)
        self._remove_settled()

    def settle(self) -> None:
        """Verify steps whose results are on the host, and remove the requests settled by that."""
        self._recorder.settle()
        self._remove_settled()

    def settle_requests(self, requests: Sequence[RequestState]) -> None:
        """Verify all steps of some requests. Waits for the results of these steps only."""
        self._recorder.settle_until(self._recorder.last_step_of(requests))
        self._remove_settled()

    def __len__(self) -> int:
        return len(self._slots)

    def running(self, request_id: str) -> RequestState | None:
        """Return the running request with vLLM's id; None if it has no plan or has ended."""
        request = self._slots.get(request_id)
        return request if request is not None and self._slots.runs(request) else None

    def all(self) -> Iterable[RequestState]:
        """Return every request that is not settled: running, or finished with steps in flight."""
        return self._slots.all()

    def biases_of(self, request_id: str) -> BiasesAt | None:
        """Return what a request adds to logits by position, by vLLM's id; None: nothing."""
        request = self._slots.get(request_id)
        return request.biases_at if request is not None and request.has_biases else None

    def of_uids(self, uids: Iterable[str]) -> list[RequestState]:
        """Return every request of some uids, settled or not."""
        wanted = set(uids)
        finished = [request for uid in wanted for request in self._finished.get(uid, ())]
        return finished + [request for request in self._slots.all() if request.uid in wanted]

    def pop_finished(self, uid: str) -> list[RequestState]:
        return self._finished.pop(uid, [])

    @property
    def failures(self) -> dict[str, Failure]:
        """Failures of running requests that are not reported yet, by vLLM's request id."""
        return dict(self._slots.failures)

    def clear_failures(self) -> None:
        self._slots.failures.clear()

    def pop_nonfinite(self, request_ids: Iterable[str]) -> set[str]:
        """Return, once, vLLM's ids of those ended requests that had a value that is not finite."""
        known = self._slots.nonfinite
        nonfinite = known.intersection(request_ids) if known else set()
        known -= nonfinite
        return nonfinite

    @property
    def is_empty(self) -> bool:
        """Whether there are no requests, neither running nor finished."""
        return not len(self._slots) and not self._finished

    def _remove_settled(self) -> None:
        """Remove finished requests whose steps are all settled from the slots."""
        if not self._finishing:
            return
        settled = self._recorder.settled
        removed = [request for number, request in self._finishing if number <= settled]
        if removed:
            self._finishing = [finishing for finishing in self._finishing if finishing[0] > settled]
            self._slots.remove(removed)
            if self._recorder.kept is not None:
                self._recorder.kept.release([request.slot for request in removed])
        for request in removed:
            self._finished.setdefault(request.uid, []).append(request)
