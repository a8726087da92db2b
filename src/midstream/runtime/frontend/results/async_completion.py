"""Results on the outputs of an asynchronous engine's calls."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.config.config import Config
from midstream.plan import ModelShape
from midstream.runtime.frontend.input_session import as_one_request, closing
from midstream.runtime.frontend.request.budget import row_sizes
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.results.delivery import (
    FinishedRequest,
    deliver_soon,
    set_nothing,
    set_on_output,
)
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.frontend.results.readouts import parted
from midstream.runtime.frontend.results.receipts import ReceiptReporter
from midstream.runtime.frontend.results.row_streamer import RowStreamer
from midstream.runtime.frontend.stats import RequestTotals
from midstream.sinks.sink_set import SinkSet

# Results with more bytes than this are assembled in a thread, not on the event loop.
_THREAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CallEnd:
    """What the end of a call does to its requests."""

    abort: Callable[[list[str]], Awaitable[None]]
    ended: Callable[[GenerateCall], None]  # called before results are fetched
    collected: Callable[[GenerateCall], None]  # called when results were fetched


@dataclass(eq=False)
class AsyncCompletion:
    """Sets results on the outputs of calls. Not thread-safe: call on the engine's event loop."""

    _config: Config
    _shape: ModelShape
    _sinks: SinkSet
    _streamer: RowStreamer
    _end: CallEnd
    totals: RequestTotals = field(default_factory=RequestTotals)

    async def complete(self, call: GenerateCall, output: Any) -> None:
        """Set the results that exist by now on an output."""
        set_nothing(output)
        if call.admitted is None:
            return
        if call.session is not None:
            call.session.latest = output
            _record(call, output)
            # vLLM does not know that no other turn can follow a failed one.
            failed = output.outputs[0].finish_reason == "error"
            if failed or (output.finished and not _was_aborted(output)):
                await self._finish(call, output)
            if call.failure is not None:
                raise call.failure
            return
        single = output.outputs[0] if len(output.outputs) == 1 else None
        has_results = output.finished and not _was_aborted(output)
        if single is not None and (call.is_delta or not has_results):
            _record(call, output)
        if has_results:
            await self._finish(call, output)
            return
        if single is not None and call.stream is not None:
            if not output.finished:
                span = call.stream.next_span()
                if span is not None:
                    assert call.replica is not None
                    call.stream.add(await call.replica.batcher.peek(call.admitted.uid, span))
            output.probes = single.probes = call.stream.probes()
            if call.partial_rows is not None and call.partial_rows.is_streamed:
                shown = parted(await self._streamer.show(call, output.finished), call.admitted)
                output.activations = single.activations = shown.activations
                for name, value in shown.readouts.items():
                    setattr(single, name, value)
                    setattr(output, name, value)
        if call.failure is not None:
            raise call.failure

    async def close_session(self, call: GenerateCall) -> Any:
        """Return a last output with results for a session that vLLM ended without one; or None."""
        if call.session is None or call.admitted is None:
            return None
        output = closing(call.session, call.is_delta)
        if output is not None:
            await self._finish(call, output)
        return output

    async def _finish(self, call: GenerateCall, output: Any) -> None:
        """Fetch a call's results, deliver them, and set them on its last output."""
        assert call.admitted is not None
        assert call.replica is not None
        plan = call.admitted.plan
        if any(isinstance(completion.stop_reason, str) for completion in output.outputs):
            # Stop strings are found in this process, and the engine generates until the request is
            # aborted. The abort must precede the release of its capacity to other requests.
            await self._end.abort(call.ids)
        self._end.ended(call)
        if call.partial_rows is not None:
            await self._streamer.stop(call)
        answers = await call.replica.batcher.collect(call.admitted.uid)
        call.is_collected = True
        self._end.collected(call)
        whole = _whole(output, call)
        if call.session is not None and call.stream is not None:
            generated, inputs = call.stream.generated, call.session.inputs
            whole, plan = as_one_request(output, generated, inputs, plan, answers)
        admitted = call.admitted
        if plan is not admitted.plan:
            admitted = replace(admitted, plan=plan)
        args = admitted, whole, self._shape, answers, call.partial_rows
        if sum(len(answer.data) for answer in answers) > _THREAD_BYTES:
            finished = await asyncio.to_thread(FinishedRequest.of, *args)
        else:
            finished = FinishedRequest.of(*args)
        if not set_on_output(output, finished):
            (await deliver_soon(self._sinks, finished)).set_results(output)
        self._count(call, output)
        reporter = ReceiptReporter(self._config)
        reporter.add(output)
        reporter.report([output])

    def _count(self, call: GenerateCall, output: Any) -> None:
        assert call.admitted is not None
        receipts = [completion.receipt for completion in output.outputs]
        plan = call.admitted.plan
        self.totals.add(receipts, row_sizes(plan, self._shape), plan.reduced)
        for span in call.spans:
            span.finish(call.admitted, receipts[span.completion], self._shape)
        call.spans.clear()


def _record(call: GenerateCall, output: Any) -> None:
    assert call.admitted is not None
    if call.stream is None:
        prompt = output.prompt_token_ids or [0] * call.admitted.plan.prompt_len
        call.stream = StreamState(call.admitted.plan, prompt)
    completion = output.outputs[0]
    # With CUMULATIVE, this is vLLM's own list, which grows while scores are fetched.
    completion.token_ids = list(completion.token_ids)
    call.stream.record(completion, call.is_delta)


def _whole(output: Any, call: GenerateCall) -> Any:
    """Return a call's last output with all of its tokens, also if outputs have only new ones."""
    if not call.is_delta or call.stream is None:
        return output
    whole = copy.copy(output)
    whole.outputs = [copy.copy(output.outputs[0])]
    whole.outputs[0].token_ids = call.stream.generated
    return whole


def _was_aborted(output: Any) -> bool:
    return any(completion.finish_reason == "abort" for completion in output.outputs)
