"""The front end of an engine that runs by itself: results are put on the outputs of each call."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from midstream.codecs import parse_codec
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.base import BaseFrontEnd, set_payload
from midstream.runtime.frontend.call import GenerateCall
from midstream.runtime.frontend.engine_info import describe
from midstream.runtime.frontend.input_session import (
    InputSession,
    as_one_request,
    check_session,
    closing,
)
from midstream.runtime.frontend.request.prompt.chat import ChatPlan
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.frontend.results.delivery import RESULTS, FinishedRequest, send_soon
from midstream.runtime.frontend.results.partial_rows import LOOK_SECONDS, PartialRows
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.frontend.results.receipts import ReceiptReporter
from midstream.runtime.frontend.results.row_streamer import RowStreamer
from midstream.runtime.frontend.rpc.replicas import busy, call_all, replicas_of
from midstream.runtime.frontend.stats import RequestTotals
from midstream.runtime.protocol.request_payload import uid_of

# Results larger than this are put together beside the event loop.
_ASIDE_BYTES = 1 << 20

_LOGGER = logging.getLogger(__name__)


class AsyncFrontEnd(BaseFrontEnd):
    """The front door of an `AsyncLLM`. All but `admit` is for the loop that the engine runs on."""

    @classmethod
    async def start(cls, engine: Any, client: Any) -> AsyncFrontEnd:
        """Asks the workers what they are.

        Args:
            engine: gives the tokenizer and the renderer, and aborts requests. What is kept of it
                should not keep it alive: the client's own tasks hold on to this front end.
            client: the engine's client of the engine core, or of several.
        """
        return cls(await call_all(client, "describe"), engine, client)

    def __init__(self, answers: list[list[dict[str, Any]]], engine: Any, client: Any) -> None:
        """Args:
        answers: per replica the workers', to `describe`.
        engine, client: as for `start`.
        """
        super().__init__(describe(answers), engine, deltas=True, busy=lambda: busy(client))
        self._engine = engine
        self._client = client
        self._replicas = replicas_of(client, self._workers)
        self._orders: dict[str, GenerateCall] = {}
        self._sessions: dict[str, GenerateCall] = {}  # of streaming input, by vLLM's id
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = RowStreamer(self.sinks, self._came)
        self._watching: asyncio.Task[None] | None = None
        self._tally = RequestTotals()

    def admit(self, request: Any, asked_for: Any) -> AdmittedRequest | None:
        if not isinstance(asked_for, GenerateCall):
            raise SpecError(
                "", "this engine returns results from generate() only; call that of AsyncLLM"
            )
        if asked_for.session is not None:
            return self._admit_input(request, asked_for, asked_for.session)
        return self._note(request, asked_for, super().admit(request, asked_for.plan))

    def _admit_input(
        self, request: Any, order: GenerateCall, session: InputSession
    ) -> AdmittedRequest | None:
        """Checks an input of a session, or the request by which vLLM ends one."""
        if not request.resumable:
            # vLLM makes it before there is any input; it finds its place when it is sent.
            set_payload(request, None)
            return None
        assert not isinstance(order.plan, ChatPlan), "a session has no messages"
        check_session(order.plan)
        session.inputs.append(list(request.prompt_token_ids))
        if len(session.inputs) > 1:
            set_payload(request, session.riding)
            return order.asked
        if order.plan is not None:
            self.sinks.check(order.plan)
        ready = self._asking.resolve_session(
            order.plan, self.steering.plan_edits(), self.vectors.lookup, session.inputs[0][0]
        )
        asked = self._note(request, order, self._let_ride(request, ready, order.plan))
        if asked is not None:
            session.riding = request.sampling_params.extra_args[KEY]
            self._sessions[request.request_id] = order
        return asked

    def _note(
        self, request: Any, order: GenerateCall, asked: AdmittedRequest | None
    ) -> AdmittedRequest | None:
        order.asked = asked
        if asked is not None:
            order.is_delta = request.sampling_params.output_kind.name == "DELTA"
            if order.session is None:
                order.pieces = PartialRows.of(
                    asked, request.request_id, request.sampling_params.n, self.sinks, self._vectors
                )
            self._orders[asked.uid] = order
            # vLLM prepares requests on a thread, which goes on when the call is cancelled. `leave`
            # looks at what is set here after it has set this: one of the two sees the other's.
            if order.is_over:
                self._forget(order, asked.uid)
                self._needs.pop(asked.uid, None)
        return asked

    async def send(self, request: Any, deliver: Callable[[Any], Awaitable[None]]) -> None:
        """Hands a request to the engine, now or when there is room for what it asks for.

        Does not wait for room: a request that waits is aborted like any other.

        Args:
            request: vLLM's EngineCoreRequest, as the engine's client is given it.
            deliver: the client's own way of sending it.
        """
        uid = uid_of(request.sampling_params)
        # A session's end carries nothing, and must not overtake its inputs.
        ending = self._sessions.get(request.request_id) if uid is None else None
        order = ending if uid is None else self._orders.get(uid)
        if order is not None and request.request_id not in order.ids:
            order.ids.append(request.request_id)
            if order.pieces is not None:
                order.pieces.ids.append(request.request_id)
                self._watch()
        passes, is_late = False, False

        def go() -> None:
            nonlocal passes
            if order is not None:
                self._place(order, request)
            if is_late and order is not None:
                delivery = self._deliver(order, deliver, request)
                order.deliveries.append(self._spawn(delivery))
            else:
                passes = True

        if ending is not None and ending.asked is not None:
            self._queue(ending.asked.uid, request, go)
        else:
            self._submit(request, go)
        is_late = True
        if passes:
            await deliver(request)

    def _place(self, order: GenerateCall, request: Any) -> None:
        """Has a request go to the replica on which there is room for its call."""
        assert order.asked is not None
        order.replica = self._replicas[self._admission.replica_of(order.asked.uid)]
        if len(self._replicas) > 1:
            request.data_parallel_rank = order.replica.number

    async def complete(self, order: GenerateCall, output: Any) -> None:
        """Puts on an output what there is of its results.

        Args:
            order: the call's.
            output: vLLM's RequestOutput, the call's next.

        Raises:
            ReceiptError: it is the last, and what was done is not what was asked for.
        """
        for holder in (output, *output.outputs):
            for name in RESULTS:
                setattr(holder, name, None)
        if order.asked is None:
            return
        if order.session is not None:
            await self._complete_turn(order, order.session, output)
            return
        single = output.outputs[0] if len(output.outputs) == 1 else None
        has_results = output.finished and not _was_aborted(output)
        if single is not None and (order.is_delta or not has_results):
            _see(order, output)
        if has_results:
            await self._finish(order, output)
            return
        if single is not None and order.streamed is not None:
            if not output.finished:
                span = order.streamed.next_span()
                if span is not None:
                    assert order.replica is not None
                    order.streamed.add(await order.replica.courier.peek(order.asked.uid, span))
            output.probes = single.probes = order.streamed.probes()
            if order.pieces is not None and order.pieces.is_streamed:
                shown = await self._passing.show(order, output.finished)
                output.activations = single.activations = shown
        if order.failure is not None:
            raise order.failure

    async def _complete_turn(self, order: GenerateCall, session: InputSession, output: Any) -> None:
        """As `complete`, for a session of streaming input: its results come at its end."""
        session.latest = output
        _see(order, output)
        # Of a failed turn vLLM does not know that no other can follow it.
        failed = output.outputs[0].finish_reason == "error"
        if failed or (output.finished and not _was_aborted(output)):
            await self._finish(order, output)
        if order.failure is not None:
            raise order.failure

    async def close_session(self, order: GenerateCall) -> Any:
        """The last output of a session that vLLM ended without one, with its results; None where
        there is nothing to add.

        Raises:
            ReceiptError: what was done is not what was asked for.
        """
        if order.session is None or order.asked is None:
            return None
        output = closing(order.session, order.is_delta)
        if output is not None:
            await self._finish(order, output)
        return output

    def leave(self, order: GenerateCall) -> None:
        """A call is over. What it left behind is cleared away."""
        order.is_over = True
        for span in order.spans:
            span.tell(None)
        order.spans.clear()
        if order.asked is not None and not order.settled:
            order.settled = True
            self._tally.aborted += 1
            self._spawn(self._clear_away(order, order.asked.uid))
        if order.pieces is not None:
            self._spawn(self._passing.end(order))

    def order_of(self, request_id: str) -> GenerateCall | None:
        """The call that one of vLLM's requests belongs to, if it asks for something."""
        return next((one for one in self._orders.values() if request_id in one.ids), None)

    async def usage(self) -> dict[str, Any]:
        """What is in use, here and on the workers, and what it came to so far."""
        return {
            "requests": len(self._orders),
            "waiting": self._admission.waiting,
            "sinks": self.sinks.unwritten,
            "totals": self._tally.to_dict(),
            "workers": [
                {"replica": number, **json.loads(one["json"])}
                for number, answers in enumerate(await call_all(self._client, "usage"))
                for one in answers
            ],
        }

    async def check_integrity(self) -> None:
        """Invariants of an idle engine, here and on the workers."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        assert not self._orders
        assert not self._sessions
        assert not self._needs
        assert not self._admission.waiting
        await call_all(self._client, "check_integrity")

    def close(self) -> None:
        """Stops whatever is being done, but for what the sinks were given. For any thread."""
        for replica in self._replicas:
            replica.courier.close()
        for task in list(self._tasks):
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)
        self.sinks.close()

    async def _finish(self, order: GenerateCall, output: Any) -> None:
        """Fetches a call's results, and waits for the sinks that get some of them."""
        assert order.asked is not None
        assert order.replica is not None
        uid, plan = order.asked.uid, order.asked.plan
        if any(isinstance(one.stop_reason, str) for one in output.outputs):
            # The stop string was found here, and the engine goes on until it is told. It must
            # have been before others get the room.
            await self._client.abort_requests_async(order.ids)
        self._end([uid])
        await self._passing.stop(order)
        answers = await order.replica.courier.collect(uid)
        order.settled = True
        self._leave([uid])
        self._forget(order, uid)
        whole = _whole(output, order)
        if order.session is not None and order.streamed is not None:
            generated = order.streamed.generated
            whole, plan = as_one_request(output, generated, order, answers)
        before = {} if order.pieces is None else order.pieces.before()
        given = (whole, plan, answers, self.info.dtype, before)
        if sum(len(data) for _, data in answers) > _ASIDE_BYTES:
            blocks = await asyncio.to_thread(assemble, *given)
        else:
            blocks = assemble(*given)
        asked = replace(order.asked, plan=plan)
        await send_soon(
            self.sinks, FinishedRequest(asked, whole, self._vectors, order.pieces, blocks)
        )
        for mine, theirs in ((output, whole), *zip(output.outputs, whole.outputs, strict=True)):
            for name in RESULTS:
                setattr(mine, name, getattr(theirs, name))
        self._count(order, output)
        mismatches = ReceiptReporter(self._config)
        mismatches.add(output)
        mismatches.report([output])

    def _count(self, order: GenerateCall, output: Any) -> None:
        """Takes a call's receipts into the totals, and into vLLM's spans of it."""
        assert order.asked is not None
        receipts = [one.receipt for one in output.outputs]
        self._tally.add(receipts, parse_codec(order.asked.plan.codec).row_bytes(*self._vectors))
        for span in order.spans:
            span.tell(receipts[span.completion])
        order.spans.clear()

    async def _deliver(
        self, order: GenerateCall, deliver: Callable[[Any], Awaitable[None]], request: Any
    ) -> None:
        """Sends a request that waited."""
        [failure] = await asyncio.gather(deliver(request), return_exceptions=True)
        if failure is not None:
            # Whoever reads the call's outputs gets to know.
            order.failure = failure
            await self._engine.abort(order.ids, internal=True)

    async def _clear_away(self, order: GenerateCall, uid: str) -> None:
        """Ends a call's requests, whatever has become of them."""
        waits = self._admission.is_waiting(uid)
        if not waits:
            if order.deliveries:
                await asyncio.wait(order.deliveries)
            # vLLM may have done so before one that waited was sent. Others get the room after it.
            await self._client.abort_requests_async(order.ids)
        self._forget(order, uid)
        self._leave([uid])
        if order.replica is not None:
            await order.replica.courier.release(uid)

    def _forget(self, order: GenerateCall, uid: str) -> None:
        self._orders.pop(uid, None)
        if order.session is not None:
            for name in order.ids:
                self._sessions.pop(name, None)

    def _watch(self) -> None:
        """Sees to it that rows are passed on as long as there are requests that want it."""
        if self._watching is None:
            self._watching = self._spawn(self._keep_passing_on())

    async def _keep_passing_on(self) -> None:
        try:
            while orders := [one for one in self._orders.values() if one.pieces is not None]:
                states = self._engine.output_processor.request_states
                for order in orders:
                    if self._passing.is_due(order, states):
                        self._spawn(self._passing.pass_on(order, states))
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._watching = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EngineDeadError):
            # Nobody waits for it.
            _LOGGER.error("midstream could not see to a request", exc_info=error)


def _see(order: GenerateCall, output: Any) -> None:
    """Takes note of an output of a call with one completion."""
    assert order.asked is not None
    if order.streamed is None:
        prompt = output.prompt_token_ids or [0] * order.asked.plan.prompt_len
        order.streamed = StreamState(order.asked.plan, prompt)
    completion = output.outputs[0]
    # With CUMULATIVE, vLLM's own list, which grows while the scores are waited for.
    completion.token_ids = list(completion.token_ids)
    order.streamed.see(completion, order.is_delta)


def _whole(output: Any, order: GenerateCall) -> Any:
    """A call's last output with all of its tokens, which those of deltas do not show."""
    if not order.is_delta or order.streamed is None:
        return output
    whole = copy.copy(output)
    whole.outputs = [copy.copy(output.outputs[0])]
    whole.outputs[0].token_ids = order.streamed.generated
    return whole


def _was_aborted(output: Any) -> bool:
    return any(completion.finish_reason == "abort" for completion in output.outputs)
