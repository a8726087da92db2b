"""Changes of running requests' plans, in the front end: validation, capacity and vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from midstream.errors import BusyError, SpecError
from midstream.plan import Plan
from midstream.plan.operation import read_scalar
from midstream.plan.operations import Edit
from midstream.plan.operations.strength import with_strength
from midstream.plan.vectors.vector import Vector
from midstream.results.plan_update import PlanUpdate
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import Need
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.runtime.frontend.request.plan_resolver import PlanResolver
from midstream.runtime.frontend.request.prepared_plan import LaterPlan, PreparedPlan
from midstream.runtime.frontend.request.running_plans import PlanHistory, RunningPlans, ended
from midstream.runtime.frontend.request.same_reads import check_edits_can_change, check_same_reads
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.frontend.request.switches import without_switches
from midstream.runtime.frontend.request.token_directions import DirectionCache
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.results import index_of
from midstream.runtime.protocol.rpc import StopRequests, UpdatedPlan, UpdatePlan
from midstream.runtime.protocol.segments import device_rows_of
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.validation import at

Complete = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _ValidChange:
    uid: str
    history: PlanHistory
    given: tuple[tuple[Edit, ...], tuple[int, ...]]  # to be multiplied by `factor`
    factor: float
    prepared: PreparedPlan

    @property
    def need(self) -> Need:
        """The capacity that it takes: that for rows is the request's already."""
        return replace(self.prepared.need, counts={})


@dataclass(slots=True, eq=False)
class PendingChange:
    """A validated change of a request's plan, which has capacity."""

    history: PlanHistory
    replica: int
    message: UpdatePlan
    vectors: Sequence[Vector]
    lacked: VectorUpdate | None = None  # of `vectors`, once that is known


class PlanChanges(RunningPlans):
    """The plans of running requests, and their changes."""

    def __init__(
        self,
        resolver: PlanResolver,
        admission: Admission,
        sent_vectors: Sequence[SentVectors],
    ) -> None:
        super().__init__(resolver.bind)
        self._resolver = resolver
        self._admission = admission
        self._sent_vectors = sent_vectors
        # A change, or that requests are to stop, to the engine core; returns its answer.
        self.send: Callable[[Any], Sequence[Any]] | None = None
        # The same of an asynchronous engine, given the replica too; and a function that completes
        # the message right before it is queued.
        self.send_later: Callable[[int, Any, Complete], Awaitable[Sequence[Any]]] | None = None

    def update(
        self, name: str | CallPlan, edits: object, scale: object, source: str = "update"
    ) -> PlanUpdate:
        """Change the edits of a running request; see `begin` and `AsyncLLM.update`."""
        assert self.send is not None
        (change,) = self.begin([name], edits, scale, source)
        try:
            answers = self.send(self._completed(change))
        except BaseException:
            self._lose(change)
            raise
        return _end(change, answers)

    async def update_later(
        self, name: str | CallPlan, edits: object, scale: object, source: str = "update"
    ) -> PlanUpdate:
        """Change the edits of a running request of an asynchronous engine; see `update`."""
        if edits is not None or scale is not None:
            await self._fetch([name], edits)
        (change,) = await self._begin_later([name], edits, scale, source)
        (answers,) = await self._send([change])
        return _end(change, answers)

    async def update_all_later(
        self, names: Sequence[CallPlan], edits: object, scale: object
    ) -> list[PlanUpdate | None]:
        """Change the edits of several running requests, all or none; see `AsyncLLM.update_all`."""
        await self._fetch([name for name in names if not self._has_ended(name)], edits)
        running = [name for name in names if not self._has_ended(name)]
        changes = await self._begin_later(running, edits, scale, "update")
        answers = dict(zip(running, await self._send(changes), strict=True))
        of_name = dict(zip(running, changes, strict=True))
        return [
            _update_of(of_name[name], answers[name]) if name in of_name else None for name in names
        ]

    async def _fetch(self, names: Sequence[str | CallPlan], edits: object) -> None:
        edit_lists = (
            [edits] if edits is not None else [self.find(name)[1].given[0] for name in names]
        )
        await _fetch(self._resolver.readings.registries.directions, edit_lists)

    async def _send(self, changes: Sequence[PendingChange]) -> list[Sequence[UpdatedPlan]]:
        assert self.send_later is not None
        sending = [
            self.send_later(change.replica, change.message, partial(self._completed, change))
            for change in changes
        ]
        # A caller that gives up does not take back what was sent.
        answers = await asyncio.shield(asyncio.gather(*sending, return_exceptions=True))
        updates: list[Sequence[UpdatedPlan]] = []
        failure: BaseException | None = None
        for change, answer in zip(changes, answers, strict=True):
            if isinstance(answer, BaseException):
                self._lose(change)
                failure = failure or answer
            else:
                updates.append(answer)
        if failure is not None:
            raise failure
        return updates

    def stop(self, name: str | CallPlan, reason: str, is_error: bool = False) -> None:
        """End a running request with the tokens of its next step, as stopped or with an error."""
        assert self.send is not None
        _, message = self._stop(name, reason, is_error)
        self.send(message)

    async def stop_later(self, name: str | CallPlan, reason: str) -> None:
        """End a running request of an asynchronous engine as stopped; see `stop`."""
        assert self.send_later is not None
        replica, message = self._stop(name, reason)
        await asyncio.shield(self.send_later(replica, message, lambda request: request))

    def _stop(
        self, name: str | CallPlan, reason: str, is_error: bool = False
    ) -> tuple[int, StopRequests]:
        uid, history = self.find(name)
        if not self._admission.is_running(uid):
            raise ended(history.name)
        message = StopRequests(uid, list(history.request_ids), reason, is_error)
        return self._admission.replica_of(uid), message

    def begin(
        self,
        names: Sequence[str | CallPlan],
        edits: object,
        scale: object,
        source: str = "update",
        checked: Sequence[_ValidChange] = (),
    ) -> list[PendingChange]:
        """Validate a change of requests, and take capacity for it until they end. `edits` are those
        from now on, None: those given last; `checked`: what `_check` returned.
        """
        changes = checked or [self._check(name, edits, scale) for name in names]
        self._admission.extend({change.uid: change.need for change in changes})
        return [self._take(change, source) for change in changes]

    async def _begin_later(
        self, names: Sequence[str | CallPlan], edits: object, scale: object, source: str
    ) -> list[PendingChange]:
        """Begin a change, see `begin`, that a thread validates."""
        changes = [await in_thread(self._check, name, edits, scale) for name in names]
        for change in changes:
            if not self._admission.is_running(change.uid):
                raise ended(change.history.name)
        if any(
            edits is None and valid_change.given != valid_change.history.given
            for valid_change in changes
        ):
            changes = []  # another change came between
        return self.begin(names, edits, scale, source, changes)

    def _check(self, name: str | CallPlan, edits: object, scale: object) -> _ValidChange:
        if edits is None and scale is None:
            raise SpecError("", "give `edits`, `scale` or both")
        uid, history = self.find(name)
        own = history.call_plan.plan
        if own is not None:
            check_edits_can_change(own)
        if own is not None and own.switches:
            raise SpecError("", "a request whose probes switch its edits cannot be updated as well")
        if without_switches(history.before) is not history.before:
            raise SpecError("", "a guard of this server switches the edits of requests alone")
        if own is not None and own.controller is not None:
            raise SpecError("", 'a request with a controller in mode="sync" cannot be updated')
        # Those of several completions are submitted one after the other.
        is_sent = len(history.request_ids) >= history.completions
        if not is_sent or self._admission.is_waiting(uid):
            raise BusyError(
                f"request {history.name!r} waits for capacity; update it when it runs", 1
            )
        if not self._admission.is_running(uid):
            raise ended(history.name)
        with at("scale"):
            factor = 1.0 if scale is None else read_scalar(scale)
        own_edits = history.given if edits is None else self._read(edits)
        if edits is None and not own_edits[0]:
            raise SpecError("scale", "the request has no edits of its own; give `edits`")
        prepared = self._resolver.resolve(
            history.with_edits(with_strength(own_edits[0], factor), own_edits[1]),
            history.before,
            history.also,
            history.prompt,
        )
        check_same_reads(history.first, prepared.plan)
        if set(prepared.need.sources) - {row.source for _, row in device_rows_of(history.first)}:
            raise SpecError(
                "edits", "rows on the device are for the edits that a request begins with"
            )
        return _ValidChange(uid, history, own_edits, factor, prepared)

    def _take(self, change: _ValidChange, source: str) -> PendingChange:
        history, prepared = change.history, change.prepared
        number = 1 + len(history.later)
        history.later[number] = LaterPlan(prepared.plan, source, change.factor)
        history.given = change.given
        replica = self._admission.replica_of(change.uid)
        message = UpdatePlan(
            change.uid,
            list(history.request_ids),
            PlanVersion(number, prepared.packed, prepared.keys),
        )
        return PendingChange(history, replica, message, change.need.vectors)

    def _completed(self, change: PendingChange, message: object = None) -> UpdatePlan:
        """Return a change's message with the vectors that workers lack; queue it before others."""
        uid = change.message.uid
        if self._admission.is_running(uid):
            change.lacked = self._sent_vectors[change.replica].take(uid, change.vectors)
        return msgspec.structs.replace(change.message, vectors=change.lacked)

    def _has_ended(self, name: CallPlan) -> bool:
        try:
            uid, history = self.find(name)
        except SpecError:
            return True
        is_sent = bool(history.request_ids) and not self._admission.is_waiting(uid)
        return is_sent and not self._admission.is_running(uid)

    def _lose(self, change: PendingChange) -> None:
        if change.lacked is not None:
            self._sent_vectors[change.replica].lose(change.lacked)

    def _read(self, edits: object) -> tuple[tuple[Edit, ...], tuple[int, ...]]:
        plan = self._bind(Plan.make(edits=edits))
        assert plan is not None
        return plan.edits, plan.origins


async def _fetch(directions: DirectionCache | None, edit_lists: Sequence[object]) -> None:
    """Fetch what edits towards tokens are computed from."""
    if directions is None:
        return
    for edits in edit_lists:
        keys = directions.needed(await in_thread(Plan.make, edits=edits))
        if keys:
            await directions.fetch(keys)


def _end(change: PendingChange, answers: Sequence[UpdatedPlan]) -> PlanUpdate:
    update = _update_of(change, answers)
    if update is None:
        raise ended(change.history.name)
    return update


def _update_of(change: PendingChange, answers: Sequence[UpdatedPlan]) -> PlanUpdate | None:
    """Return where a change holds; None: the request has ended."""
    (answer,) = answers
    if not answer.positions:
        return None
    positions = {
        index_of(request_id, change.history.completions): position
        for request_id, position in answer.positions.items()
    }
    return PlanUpdate(change.message.version.number, positions)
