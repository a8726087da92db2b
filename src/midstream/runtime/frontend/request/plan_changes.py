"""Changes of running requests' plans, in the front end: validation, capacity and vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.errors import BusyError, SpecError
from midstream.results.plan_update import PlanUpdate
from midstream.runtime.frontend.conversations import Recollection
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.later_plan import LaterPlan
from midstream.runtime.frontend.request.plan_resolver import PlanResolver
from midstream.runtime.frontend.request.prepared_plan import PreparedPlan
from midstream.runtime.frontend.request.same_reads import check_edits_can_change, check_same_reads
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.results import index_of
from midstream.runtime.protocol.rpc import StopRequests, UpdatedPlan, UpdatePlan
from midstream.spec import Capture, Plan, ResolvedPlan
from midstream.spec.named_lookup import Lookup
from midstream.spec.operation import read_scalar
from midstream.spec.operations import Edit
from midstream.spec.operations.strength import with_strength
from midstream.spec.plan import ServerWide
from midstream.validation import at


@dataclass(frozen=True, slots=True)
class PromptOfRequest:
    """What a plan is resolved with, of vLLM's EngineCoreRequest and under its names."""

    prompt_token_ids: Any
    prompt_is_token_ids: Any
    prompt_embeds: Any
    sampling_params: Any

    @staticmethod
    def of(request: Any) -> PromptOfRequest:
        """Return the prompt and the parameters of a vLLM EngineCoreRequest."""
        return PromptOfRequest(
            request.prompt_token_ids,
            getattr(request, "prompt_is_token_ids", None),
            request.prompt_embeds,
            request.sampling_params,
        )


@dataclass(slots=True)
class PlanHistory:
    """The plan of a running request, as it was given and has changed since.

    Attributes:
        name: the id that its caller gave the request.
        completions: number of its completions.
        first: the plan with which it was sent, resolved.
        asked: its own plan as it was given, which no other request has.
        call_plan: the same with names bound.
        before: server-wide edits when it was admitted, which it keeps.
        also: server-wide captures, likewise.
        prompt: its prompt.
        recalled: what its gates recall of conversations; None: none of them does.
        edits: the edits given last, with names bound.
        origins: see `Plan`, of these edits.
        later: versions of its plan by number, from 1 on.
        request_ids: vLLM's ids of its requests that were submitted.
    """

    name: str
    completions: int
    first: ResolvedPlan
    asked: CallPlan
    call_plan: CallPlan
    before: tuple[ServerWide, ...]
    also: tuple[Capture, ...]
    prompt: PromptOfRequest
    recalled: Recollection | None
    edits: tuple[Edit, ...] = ()
    origins: tuple[int, ...] = ()
    later: dict[int, LaterPlan] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A validated change of a request's plan, which has capacity.

    Attributes:
        history: the request's.
        replica: number of its engine.
        message: for the engine core.
    """

    history: PlanHistory
    replica: int
    message: UpdatePlan


class PlanChanges:
    """The plans of running requests, and their changes.

    Attributes:
        send: sends a change to the engine core, or that requests are to stop, and returns its
            answer.
        send_later: the same of an asynchronous engine, given the number of the replica too.
    """

    def __init__(
        self,
        resolver: PlanResolver,
        admission: Admission,
        sent_vectors: Sequence[SentVectors],
        lookup: Lookup,
        num_layers: int,
    ) -> None:
        """Create it for one engine.

        Args:
            resolver: resolves plans.
            admission: the capacity of running requests.
            sent_vectors: the vectors of the workers of each replica.
            lookup: returns what is registered under a name.
            num_layers: number of layers of the model.
        """
        self._resolver = resolver
        self._admission = admission
        self._sent_vectors = sent_vectors
        self._lookup = lookup
        self._num_layers = num_layers
        self._running: dict[str, PlanHistory] = {}
        self.send: Callable[[Any], Sequence[Any]] | None = None
        self.send_later: Callable[[int, Any], Awaitable[Sequence[Any]]] | None = None

    def __len__(self) -> int:
        """Return the number of requests whose plans can change."""
        return len(self._running)

    def add(
        self,
        uid: str,
        first: ResolvedPlan,
        request: Any,
        call_plan: CallPlan,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
        later: dict[int, LaterPlan],
        recalled: Recollection | None,
    ) -> None:
        """Add a request that is admitted.

        Args:
            uid: midstream's request id.
            first: its plan, resolved.
            request: vLLM's EngineCoreRequest.
            call_plan: its own plan.
            before, also: server-wide edits and captures.
            later: the versions that its probes may switch to; gets all later ones.
            recalled: what its gates recall of conversations; None: none of them does.
        """
        own, asked = call_plan.plan, call_plan
        if own is not None and own.names():
            # A name may mean something else later.
            own = own.bind(self._lookup, self._num_layers)
            call_plan = replace(call_plan, plan=own)
        self._running[uid] = PlanHistory(
            name=request.request_id,
            completions=request.sampling_params.n,
            first=first,
            asked=asked,
            call_plan=call_plan,
            before=before,
            also=also,
            prompt=PromptOfRequest.of(request),
            recalled=recalled,
            edits=() if own is None else own.edits,
            origins=() if own is None else own.origins,
            later=later,
        )

    def submitted(self, uid: str, request_id: str) -> None:
        """Record the id of a vLLM request that was submitted. Requests that cannot change are
        ignored, here and in `remove`.
        """
        found = self._running.get(uid)
        if found is not None:
            found.request_ids.append(request_id)

    def ids_of(self, uid: str) -> Sequence[str]:
        """Return vLLM's ids of the requests that were submitted for one with a plan."""
        found = self._running.get(uid)
        return () if found is None else found.request_ids

    def remove(self, uids: Iterable[str]) -> None:
        """Remove requests that have ended."""
        for uid in uids:
            self._running.pop(uid, None)

    def update(
        self, name: str | CallPlan, edits: object, scale: object, source: str = "update"
    ) -> PlanUpdate:
        """Change the edits of a running request; see `begin` and `AsyncLLM.update`."""
        assert self.send is not None
        change = self.begin(name, edits, scale, source)
        try:
            answers = self.send(change.message)
        except BaseException:
            self._lose(change)
            raise
        return _end(change, answers)

    async def update_later(
        self, name: str | CallPlan, edits: object, scale: object, source: str = "update"
    ) -> PlanUpdate:
        """Change the edits of a running request of an asynchronous engine; see `update`."""
        assert self.send_later is not None
        change = self.begin(name, edits, scale, source)
        sent = asyncio.ensure_future(self.send_later(change.replica, change.message))
        try:
            # A caller that gives up does not take back what was sent.
            answers = await asyncio.shield(sent)
        except Exception:
            self._lose(change)
            raise
        return _end(change, answers)

    def stop(self, name: str | CallPlan, reason: str, is_error: bool = False) -> None:
        """End a running request with the tokens of its next step.

        Args:
            name: see `begin`.
            reason: the stop reason of its completions.
            is_error: whether it ends with an error, and not as stopped.

        Raises:
            SpecError: the request is not running.
        """
        assert self.send is not None
        _, message = self._stop(name, reason, is_error)
        self.send(message)

    async def stop_later(self, name: str | CallPlan, reason: str) -> None:
        """End a running request of an asynchronous engine as stopped; see `stop`."""
        assert self.send_later is not None
        replica, message = self._stop(name, reason)
        await asyncio.shield(self.send_later(replica, message))

    def _stop(
        self, name: str | CallPlan, reason: str, is_error: bool = False
    ) -> tuple[int, StopRequests]:
        uid, history = self._find(name)
        if not self._admission.is_running(uid):
            raise _ended(history.name)
        message = StopRequests(uid, list(history.request_ids), reason, is_error)
        return self._admission.replica_of(uid), message

    def begin(
        self, name: str | CallPlan, edits: object, scale: object, source: str = "update"
    ) -> PendingChange:
        """Validate a change and take capacity for it, until the request ends.

        Args:
            name: the id that the request's caller gave it, or the plan that it was sent with.
            edits: the request's edits from now on, in any form; None: those given last.
            scale: factor on their strength; None: 1.
            source: who changes it.

        Raises:
            SpecError: the request is not running, or the edits are malformed or cannot be carried
                out for it.
            BusyError: there is no capacity for them now.
        """
        if edits is None and scale is None:
            raise SpecError("", "give `edits`, `scale` or both")
        uid, history = self._find(name)
        own = history.call_plan.plan
        if own is not None:
            check_edits_can_change(own)
        if own is not None and own.switches:
            raise SpecError("", "a request whose probes switch its edits cannot be updated as well")
        if own is not None and own.controller is not None:
            raise SpecError("", 'a request with a controller in mode="sync" cannot be updated')
        if not history.request_ids or self._admission.is_waiting(uid):
            raise BusyError(
                f"request {history.name!r} waits for capacity; update it when it runs", 1
            )
        if not self._admission.is_running(uid):
            raise _ended(history.name)
        with at("scale"):
            factor = 1.0 if scale is None else read_scalar(scale)
        given = (history.edits, history.origins) if edits is None else self._read(edits)
        if edits is None and not given[0]:
            raise SpecError("scale", "the request has no edits of its own; give `edits`")
        prepared = self._prepare(history, with_strength(given[0], factor), given[1])
        check_same_reads(history.first, prepared.plan)
        need = replace(prepared.need, rows=0, readout_rows=0, sums=0, states=0)
        self._admission.extend(uid, need)
        number = 1 + len(history.later)
        history.later[number] = LaterPlan(prepared.plan, source, factor)
        history.edits, history.origins = given
        replica = self._admission.replica_of(uid)
        message = UpdatePlan(
            uid,
            list(history.request_ids),
            PlanVersion(number, prepared.packed, prepared.keys),
            self._sent_vectors[replica].take(uid, need.vectors),
        )
        return PendingChange(history, replica, message)

    def _lose(self, change: PendingChange) -> None:
        """Record that a change could not be sent."""
        if change.message.vectors is not None:
            self._sent_vectors[change.replica].lose(change.message.vectors)

    def _find(self, name: str | CallPlan) -> tuple[str, PlanHistory]:
        found = [
            (uid, one)
            for uid, one in list(self._running.items())  # a thread may admit others
            if name in (one.asked if isinstance(name, CallPlan) else one.name,)
        ]
        if not found:
            raise _ended(name if isinstance(name, str) else "")
        if len(found) > 1:
            raise SpecError("request_id", f"{len(found)} running requests have the id {name!r}")
        return found[0]

    def _read(self, edits: object) -> tuple[tuple[Edit, ...], tuple[int, ...]]:
        plan = Plan.make(edits=edits)
        assert plan is not None
        plan = plan.bind(self._lookup, self._num_layers)
        return plan.edits, plan.origins

    def _prepare(
        self, history: PlanHistory, edits: tuple[Edit, ...], origins: tuple[int, ...]
    ) -> PreparedPlan:
        own = history.call_plan.plan
        captures, probes = ((), ()) if own is None else (own.captures, own.probes)
        plan = None
        if captures or edits or probes:
            plan = Plan(captures, edits, probes, origins if edits else ())
        return self._resolver.resolve(
            replace(history.call_plan, plan=plan),
            history.before,
            history.also,
            self._lookup,
            history.prompt,
            history.recalled,
        )


def _end(change: PendingChange, answers: Sequence[UpdatedPlan]) -> PlanUpdate:
    """Return where a change holds.

    Args:
        change: the change.
        answers: the engine core's answer.

    Raises:
        SpecError: the request has ended.
    """
    (answer,) = answers
    history = change.history
    if not answer.positions:
        raise _ended(history.name)
    found = {
        index_of(request_id, history.completions): position
        for request_id, position in answer.positions.items()
    }
    return PlanUpdate(change.message.version.number, found)


def _ended(name: str) -> SpecError:
    return SpecError(
        "request_id",
        f"request {name!r} is not running: it has ended, or no request with a plan has this id; "
        "one that begins with edits=[] can be changed later",
    )
