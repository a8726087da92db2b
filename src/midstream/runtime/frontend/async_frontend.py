"""The front end of an engine with an event loop: each call gets its results on its own outputs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from midstream.config.config import KEY
from midstream.errors import BusyError, SpecError
from midstream.plan import Plan
from midstream.results.receipt import WeightVersion
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.base import BaseFrontEnd, set_payload
from midstream.runtime.frontend.engine_info import FrontEnds, describe
from midstream.runtime.frontend.input_session import InputSession, check_session
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.intake import Intake
from midstream.runtime.frontend.results.async_completion import AsyncCompletion, CallEnd
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.row_streamer import RowStreamer
from midstream.runtime.frontend.rpc.background_tasks import BackgroundTasks
from midstream.runtime.frontend.rpc.parameters import fetch_parameter
from midstream.runtime.frontend.rpc.replicas import busy, call, call_all, replicas_of
from midstream.runtime.frontend.rpc.workers_usage import WorkersUsage
from midstream.runtime.frontend.tracing import DelayedSpan
from midstream.runtime.frontend.weight_watch import latest, watch_async_client
from midstream.runtime.protocol.request_payload import uid_of
from midstream.runtime.protocol.rpc import CheckIntegrity, DescribeWorker, ReadWeights
from midstream.runtime.protocol.worker_info import WorkerInfo

Deliver = Callable[[Any], Awaitable[None]]


class AsyncFrontEnd(BaseFrontEnd):
    """The front end of an `AsyncLLM`. Call on its event loop, but for `admit` and `close`."""

    @classmethod
    async def start(cls, engine: Any, client: Any) -> AsyncFrontEnd:
        """Create the front end, after asking the workers for their descriptions."""
        front = cls(await call_all(client, DescribeWorker()), engine, client)
        watch_async_client(client, front.forget_readings)
        return front

    def __init__(self, answers: list[list[WorkerInfo]], engine: Any, client: Any) -> None:
        """Create it. `engine` is a proxy: the client's tasks, which keep this, must not keep it."""
        info = describe(answers, FrontEnds.of(engine.vllm_config))
        super().__init__(info, engine, deltas=True, busy=lambda: busy(client))
        self._engine, self._client = engine, client
        self._usage, self._replicas = WorkersUsage(client), replicas_of(client, self._workers)
        self.directions.carry_out_later = self._replicas[0].batcher.carry_out
        self.directions.is_shared = info.front_ends.count > 1
        self.changes.send_later = partial(call, client)
        self._calls: dict[CallPlan, GenerateCall] = {}
        self.plain: Counter[str] = Counter()  # running calls without a plan, by callers' ids
        self._admitted: dict[str, GenerateCall] = {}  # by uid
        self._sessions: dict[str, GenerateCall] = {}  # of streaming input, by vLLM's id
        self.intake, self._tasks = Intake(), BackgroundTasks()
        self._streamer = RowStreamer(self.sinks, self._admission.release_rows, self._tasks)
        self.completion = AsyncCompletion(
            self._config, self.info.shape, self.sinks, self._streamer,
            CallEnd(
                client.abort_requests_async,
                lambda call: self._release_tables([call.uid]),
                self._collected,
            ),
        )  # fmt: skip

    def begin(self, plan: CallPlan, session: InputSession | None) -> GenerateCall:
        """Begin a call, whose request is to be admitted with this very plan; pair with `leave`."""
        call = self._calls[plan] = GenerateCall(plan, session)
        return call

    def admit(self, request: Any, plan: Plan | CallPlan | None) -> AdmittedRequest | None:
        if plan is None and request.request_id in self.plain:
            return None
        call = self._calls.get(plan) if isinstance(plan, CallPlan) else None
        if call is None:
            raise SpecError(
                "", "this engine returns results from generate() only; call that of AsyncLLM"
            )
        is_guarded = bool(call.call_plan.guards)
        if is_guarded or call.plan is not None or self.concerns(request.sampling_params):
            self.intake.check(self._admission.waiting)
        if call.session is not None:
            return self._admit_input(request, call, call.session)
        return self._register(request, call, super().admit(request, plan))

    def _admit_input(
        self, request: Any, call: GenerateCall, session: InputSession
    ) -> AdmittedRequest | None:
        """Validate an input of a session, or the request by which vLLM ends a session."""
        if not request.resumable:
            # vLLM makes it before the first input; `send` finds its session.
            set_payload(request, None)
            return None
        check_session(call.plan)
        session.inputs.append(list(request.prompt_token_ids))
        if len(session.inputs) > 1:
            set_payload(request, session.payload)
            return call.admitted
        if call.plan is not None:
            self.sinks.check(call.plan)
        also, first = self.captures.current, session.inputs[0][0]
        before = self.before(call.call_plan)
        prepared = self._resolver.resolve_session(call.plan, before, also, first)
        made = self._attach_payload(request, prepared, call.plan, also)
        admitted = self._register(request, call, made)
        if admitted is not None:
            session.payload = request.sampling_params.extra_args[KEY]
            self._sessions[request.request_id] = call
        return admitted

    def _register(
        self, request: Any, call: GenerateCall, admitted: AdmittedRequest | None
    ) -> AdmittedRequest | None:
        call.admitted = admitted
        if admitted is not None:
            call.is_delta = request.sampling_params.output_kind.name == "DELTA"
            if call.session is None:
                args = request.request_id, request.sampling_params.n, self.sinks, self.info.shape
                call.partial_rows = PartialRows.of(admitted, *args)
            self._admitted[admitted.uid] = call
            # vLLM prepares requests in a thread, which runs on after a cancelled call. `leave`
            # reads `admitted` after it has set `is_over`: at least one of the two cleans up.
            if call.is_over:
                self._forget(call)
                self._needs.pop(admitted.uid, None)
                self._reused.pop(admitted.uid, None)
                self.device_sources.end(admitted.uid)
                self.changes.remove([admitted.uid])
        return admitted

    async def send(self, request: Any, deliver: Deliver) -> None:
        """Send a request by `deliver`, now or when there is capacity. It can be aborted before."""
        uid = uid_of(request.sampling_params)
        if uid is None and request.request_id not in self._sessions:
            await deliver(request)
            return
        need = None if uid is None else self._needs.get(uid)
        if uid in self._reused or (need is not None and (need.vectors or need.device_rows)):
            deliver = _within(self._with_vectors, deliver)
        # The end of a session has no payload, and must not overtake the session's inputs.
        ending = self._sessions.get(request.request_id) if uid is None else None
        call = ending if uid is None else self._admitted.get(uid)
        if call is not None and request.request_id not in call.ids:
            call.ids.append(request.request_id)
            if call.partial_rows is not None:
                call.partial_rows.ids.append(request.request_id)
                states = partial(getattr, self._engine.output_processor, "request_states")
                self._streamer.run(self._admitted.values, states)
        is_sent_here, is_late = False, False

        def send_now() -> None:
            nonlocal is_sent_here
            if call is not None:
                self._set_replica(call, request)
            if is_late and call is not None:
                _end_wait(call)
                call.sends.append(self._tasks.start(self._send_late(call, deliver, request)))
            else:
                is_sent_here = True

        if ending is not None and ending.admitted is not None:
            self._submit_as(ending.admitted.uid, request, send_now)
        else:
            self._submit(request, send_now)
        is_late = True
        if is_sent_here:
            await deliver(request)
        elif call is not None and call.wait is None:
            call.wait = self.intake.begin_wait(call.ids[0], partial(self._give_up, call))

    def _give_up(self, call: GenerateCall, error: BusyError) -> None:
        """End a call that waited too long: `complete` raises the error for its reader."""
        call.failure = error
        self._tasks.start(self._engine.abort(call.ids, internal=True))

    def _set_replica(self, call: GenerateCall, request: Any) -> None:
        call.replica = self._replicas[self._admission.replica_of(call.uid)]
        if len(self._replicas) > 1:
            request.data_parallel_rank = call.replica.number

    async def _send_late(self, call: GenerateCall, deliver: Deliver, request: Any) -> None:
        [failure] = await asyncio.gather(deliver(request), return_exceptions=True)
        if failure is not None:
            call.failure = failure  # raised by `complete` for the reader of the call's outputs
            await self._engine.abort(call.ids, internal=True)

    def leave(self, call: GenerateCall) -> None:
        """End a call, and release in the background what is left of it."""
        self._calls.pop(call.call_plan, None)
        call.is_over = True
        _end_wait(call)
        while call.spans:
            call.spans.pop(0).finish(call.admitted, None, self.info.shape)
        if call.admitted is not None and not call.is_collected:
            call.is_collected = True
            self.completion.totals.aborted += 1
            self._tasks.start(self._clear_away(call, call.admitted.uid))
        if call.partial_rows is not None:
            self._tasks.start(self._streamer.end(call))

    async def _clear_away(self, call: GenerateCall, uid: str) -> None:
        if not self._admission.is_waiting(uid):
            if call.sends:
                await asyncio.wait(call.sends)
            # vLLM may have aborted before a request that waited was sent. Other requests must not
            # get the capacity before this.
            await self._client.abort_requests_async(call.ids)
        self._forget(call)
        self._release([uid])
        if call.replica is not None:
            await call.replica.batcher.release(uid)

    def _collected(self, call: GenerateCall) -> None:
        """Release all capacity of a call whose results were fetched."""
        self._release([call.uid])
        self._forget(call)

    def _forget(self, call: GenerateCall) -> None:
        self._admitted.pop(call.uid, None)
        if call.session is not None:
            for name in call.ids:
                self._sessions.pop(name, None)

    def spans_of(self, request_id: str) -> list[DelayedSpan] | None:
        """Return the list for the span of a request, by vLLM's id; None: it has no plan."""
        return next(
            (call.spans for call in self._admitted.values() if request_id in call.ids), None
        )

    async def usage(self, timeout: float | None = None) -> dict[str, Any]:
        """Return what is in use, here and on the workers, and the totals of ended requests."""
        usage = await self._usage.read(timeout)
        versions = [
            {"number": worker["weight_version"], "name": worker["weight_name"]}
            for worker in usage["workers"]
        ]
        return {
            "requests": len(self._admitted),
            "waiting": self._admission.waiting,
            "sinks": self.sinks.unwritten,
            "totals": self.completion.totals.to_dict(),
            "weight_version": max(versions, key=itemgetter("number"), default=None),
            **usage,
        }

    async def parameter(self, name: str) -> Tensor:
        return await fetch_parameter(self._engine, self._replicas[0].batcher, name)

    async def weight_version(self) -> WeightVersion:
        answers = await call_all(self._client, ReadWeights())
        return latest(state for mine in answers for state in mine)

    async def check_integrity(self) -> None:
        """Check the invariants of an idle engine, here and on the workers."""
        await self._tasks.wait()
        for things in (self._calls, self.plain, self._admitted, self._sessions, self._needs):
            assert not things
        assert not self._reused
        assert self._admission.waiting + len(self.changes) == 0
        check = CheckIntegrity(self.info.front_ends.number)
        self.check_vectors(await call_all(self._client, check))
        assert not any(sent.in_use for sent in self._sent_vectors)

    def has_calls(self) -> bool:
        """Return whether a call with a plan has not ended. May be called from any thread."""
        return any(call.plan or call.admitted is not None for call in list(self._calls.values()))

    def close(self) -> None:
        """Cancel all work, except for what the sinks were given. May be called from any thread."""
        for replica in self._replicas:
            replica.batcher.close()
        self._tasks.cancel()
        self.sinks.close()


def _within(context: Callable[[Any], AbstractContextManager[None]], deliver: Deliver) -> Deliver:
    """Deliver in a context of the request. `deliver` queues it before it waits for anything."""

    async def run(request: Any) -> None:
        with context(request):
            await deliver(request)

    return run


def _end_wait(call: GenerateCall) -> None:
    if call.wait is not None:
        call.wait.end()
