"""One call of `AsyncLLM.generate`: its plan on the way in, its results on the way out."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM

from midstream.api.arguments import CallArguments, check_names
from midstream.api.controller import ControlledRequest, check_controlled
from midstream.api.default_capture import DefaultCapture
from midstream.api.last_token import (
    EngineLimits,
    LastTokenRequest,
    check,
    check_controller,
    check_epoch,
    check_prompts,
    requests_of,
)
from midstream.api.sampling_params import check_params
from midstream.deadlines import all_of
from midstream.errors import MidstreamError, SpecError
from midstream.plan import Plan
from midstream.plan.control.controller import Controller
from midstream.runtime.frontend.async_frontend import AsyncFrontEnd
from midstream.runtime.frontend.input_session import InputSession, with_call_plan
from midstream.runtime.frontend.request.call_plan import CallPlan, merged_plan, with_plan
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.results.delivery import set_nothing

# Returns an engine's front end, once it exists, and the capture of every request.
Started = Callable[[], Awaitable[tuple[AsyncFrontEnd, DefaultCapture | None]]]


def only_front(front: AsyncFrontEnd) -> Started:
    async def started() -> tuple[AsyncFrontEnd, None]:
        return front, None

    return started


class AsyncEngineCall:
    """One call of an asynchronous engine."""

    def __init__(
        self,
        llm: VllmAsyncLLM,
        started: Started,
        arguments: CallArguments,
        controller: Controller | None = None,
    ) -> None:
        """Create it; `started` is called when the first output is asked for."""
        self._controller = controller
        self._llm = llm
        self._started = started
        self._default: DefaultCapture | None = None
        self._arguments = arguments

    async def outputs(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None,
        vllm_args: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of the call with their results; see `AsyncLLM.generate`."""
        check_names("generate", vllm_args, VllmAsyncLLM.generate)
        check_params(sampling_params)
        self._front, self._default = await self._started()
        if request_id is None:
            request_id = uuid.uuid4().hex
        front, epoch = self._front, 0 if self._default is None else self._front.steering.epoch
        call: GenerateCall | None = None
        stream: Any = None
        controlled: ControlledRequest | None = None
        is_plain = False
        try:
            plan = self._plan(prompt, sampling_params)
            if plan is None and self._is_plain(prompt, sampling_params):
                is_plain = True
                front.plain[request_id] += 1
                args = (prompt, sampling_params, request_id)
                stream = VllmAsyncLLM.generate(self._llm, *args, **vllm_args)
                async for output in stream:
                    set_nothing(output)
                    yield output
                return
            call, params = self._begin(plan, prompt, sampling_params)
            await call.take_names(front.sinks)
            if self._controller is not None:
                check_controlled(call.plan, params, self._controller)
                check_controller(self._default)
                controlled = ControlledRequest(
                    self._controller, front.changes, call.call_plan, request_id
                )
            keys = front.directions.needed(call.plan)
            if keys:
                await front.directions.fetch(keys)
            if call.session is None:
                others = (front.before(call.call_plan), front.also(call.call_plan))
                await front.plans.resolve_ahead(call.call_plan, prompt, params, *others)
            else:
                prompt = with_call_plan(prompt, call.call_plan, params)
            stream = VllmAsyncLLM.generate(self._llm, prompt, params, request_id, **vllm_args)
            async for output in stream:
                await front.completion.complete(call, output)
                if controlled is not None and call.stream is not None:
                    controlled.observe(output, len(call.stream.generated))
                if self._default is not None:
                    await self._attach_default(call, output, prompt, params, epoch)
                yield output
            # A session has no default capture.
            last = await front.completion.close_session(call)
            if last is not None:
                yield last
        except Exception as error:
            own_error = _own(error)
            if isinstance(own_error, SpecError):
                raise self._arguments.explain(own_error) from None
            if own_error is not None and own_error is not error:
                raise own_error from None
            raise
        finally:
            if controlled is not None:
                controlled.close()
            # If the caller closed this generator early, vLLM aborts the request.
            try:
                if stream is not None:
                    await stream.aclose()
            finally:
                if is_plain:
                    front.plain[request_id] -= 1
                    if not front.plain[request_id]:
                        del front.plain[request_id]
                if call is not None:
                    call.release_names()
                    front.plans.forget(call.call_plan)
                    front.leave(call)

    def _plan(self, prompt: Any, sampling_params: SamplingParams) -> Plan | CallPlan | None:
        """Return the plan of the call and of the default capture; None: they ask for nothing."""
        asked = None if self._arguments.nothing else self._arguments.alone().plan()
        plan = merged_plan(asked, sampling_params)
        if self._default is not None:
            if isinstance(prompt, AsyncGenerator):
                raise SpecError(
                    "prompt",
                    "a session of streaming input cannot capture for AsyncLLM(layers=…); call "
                    "remove_hooks() first, and give the session a capture of its own",
                )
            self._default.check(self._front.info.shape)
            check_prompts(self._default, [prompt])
            own = plan.plan if isinstance(plan, CallPlan) else plan
            check(self._default, own, self._front)
            # Only calls with one completion, and with outputs before the last, may stream.
            stream = sampling_params.n == 1 and sampling_params.output_kind.name != "FINAL_ONLY"
            joined = self._default.join(own, sampling_params.max_tokens, stream)
            plan = replace(plan, plan=joined) if isinstance(plan, CallPlan) else joined
        return plan

    def _is_plain(self, prompt: Any, sampling_params: SamplingParams) -> bool:
        """Return whether nothing applies to a call without a plan: vLLM alone serves it."""
        is_session = isinstance(prompt, AsyncGenerator)
        is_asked = self._controller is not None or self._default is not None
        return not (is_session or is_asked or self._front.concerns(sampling_params))

    def _begin(
        self, plan: Plan | CallPlan | None, prompt: Any, sampling_params: SamplingParams
    ) -> tuple[GenerateCall, SamplingParams]:
        """Begin a call, and return its sampling parameters; the caller's are not changed."""
        session = InputSession() if isinstance(prompt, AsyncGenerator) else None
        if isinstance(prompt, EngineCoreRequest):
            if plan is not None or self._front.concerns(sampling_params):
                raise SpecError(
                    "prompt", "an EngineCoreRequest bypasses request validation; give the prompt"
                )
            return GenerateCall(CallPlan(None)), sampling_params
        if isinstance(plan, CallPlan):
            # The server attached it to a copy of its own.
            return self._front.begin(plan, session), sampling_params
        call_plan = CallPlan(plan)
        return self._front.begin(call_plan, session), with_plan(sampling_params, call_plan)

    async def _attach_default(
        self, call: GenerateCall, output: Any, prompt: Any, params: SamplingParams, epoch: int
    ) -> None:
        """Set `hidden_states` on an output; on the last one also the last tokens' rows."""
        assert self._default is not None
        limits = EngineLimits.of(self._llm, self._front)
        prompt_len = 0 if call.admitted is None else call.admitted.plan.prompt_len
        self._default.attach(output, limits.num_layers, prompt_len)
        if not output.finished:
            return
        generated = call.stream.generated if call.is_delta and call.stream else None
        wanted = requests_of(self._default, output, prompt, params, limits, generated)
        if wanted:
            ids = [f"{output.request_id}-last-{index}" for index in range(len(wanted))]
            outputs = await all_of(map(self._compute, wanted, ids))
            check_epoch(epoch, self._front)
            for request, last in zip(wanted, outputs, strict=True):
                request.add(last)

    async def _compute(self, wanted: LastTokenRequest, request_id: str) -> RequestOutput:
        alone = AsyncEngineCall(self._llm, only_front(self._front), CallArguments())
        vllm_args = {"lora_request": wanted.lora_request}
        outputs = alone.outputs(wanted.prompt, wanted.params, request_id, vllm_args)
        return [output async for output in outputs][-1]


def _own(error: BaseException | None) -> MidstreamError | None:
    """Return the error of midstream that vLLM wrapped into its own; None: there is none."""
    while error is not None:
        if isinstance(error, MidstreamError):
            return error
        error = error.__cause__
    return None
