"""`midstream.AsyncLLM`: a `vllm.v1.engine.async_llm.AsyncLLM` whose `generate` also captures, edits
and probes.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import AsyncGenerator
from typing import Any

from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM
from vllm.v1.executor.abstract import Executor

from midstream.api.arguments import CallArguments
from midstream.config.config import KEY, Config, from_additional_config
from midstream.errors import ConfigError, MidstreamError, SpecError
from midstream.results.site_table import SiteTable
from midstream.runtime import install
from midstream.runtime.frontend import tracing
from midstream.runtime.frontend.async_frontend import AsyncFrontEnd
from midstream.runtime.frontend.call import GenerateCall
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.input_session import InputSession, with_call_plan
from midstream.runtime.frontend.request.call_plan import CallPlan, merged_plan, with_plan
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import with_midstream
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering


class AsyncLLM(VllmAsyncLLM):
    """vLLM's asynchronous engine, with midstream enabled.

    The engine core runs in a process of its own. `info`, `vectors`, `steering` and `sites()` are
    known once the workers were asked: after `await llm.ready()`, or after the first `generate`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        midstream: Config | dict[str, Any] | None = None,
        enable_steering: bool = False,
        **engine_args: Any,
    ) -> None:
        """Starts an engine. `from_engine_args` does so from vLLM's own `AsyncEngineArgs`.

        Args:
            model: name or path of the model.
            midstream: settings, a `Config` or a dict of its fields: what to tap and how much room
                there is. Default: `resid_post` at every layer (and whatever the environment
                variable `MIDSTREAM` says).
            enable_steering: tap the three residual sites instead of `resid_post` alone. Settings
                in `midstream` go first.
            **engine_args: all that `vllm.AsyncEngineArgs` takes. Or, instead of all of these, what
                vLLM's class takes: `vllm_config`, `executor_class`, `log_stats`, …

        Raises:
            ConfigError: a wrong setting.
            UnsupportedError: this vLLM, model or engine setting cannot be served rightly.
        """
        install.activate()
        seams.check_async()
        if "vllm_config" in engine_args:
            made = engine_args
            if model is not None or midstream is not None or enable_steering:
                raise ConfigError(f"{KEY}: with a vllm_config, that alone has the settings")
        else:
            if model is not None:
                engine_args["model"] = model
            given = engine_args.pop("additional_config", None)
            args = AsyncEngineArgs(
                **engine_args, additional_config=with_midstream(given, midstream, enable_steering)
            )
            made = _of_engine_args(args)
        if from_additional_config(made["vllm_config"].additional_config) is None:
            raise ConfigError(
                f"{KEY}: this vllm_config does not enable midstream; make it with "
                f'additional_config={{"{KEY}": {{}}}}'
            )
        super().__init__(**made)
        self._front_end: AsyncFrontEnd | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Any = None,
    ) -> AsyncLLM:
        """An engine from vLLM's `AsyncEngineArgs`. Where its `additional_config` does not speak of
        midstream, midstream gets the default settings.

        Raises:
            ConfigError: a wrong setting.
            UnsupportedError: this vLLM, model or engine setting cannot be served rightly.
        """
        install.activate()
        args = copy.copy(engine_args)
        args.additional_config = with_midstream(args.additional_config, None, False)
        return cls(
            **_of_engine_args(args, usage_context),
            start_engine_loop=start_engine_loop,
            stat_loggers=stat_loggers,
        )

    async def ready(self) -> None:
        """Asks the workers what they are, once. `generate` does it where nobody has.

        Raises:
            UnsupportedError: nothing is tapped.
        """
        async with self._starting:
            if self._front_end is None:
                client = self.engine_core
                # A proxy: the engine's tasks must not keep it alive, see `_run_output_handler`.
                front = await AsyncFrontEnd.start(weakref.proxy(self), client)
                deliver = client.add_request_async
                # An attribute of this one client, as of the engine's other classes.
                client.add_request_async = lambda request: front.send(request, deliver)
                install.set_front_end(self, front)
                tracing.delay_spans(self.output_processor, front.spans_of)
                self._front_end = front

    @property
    def info(self) -> EngineInfo:
        """What the workers said of themselves: model shape, taps, dtype, runner, room.

        Raises:
            RuntimeError: they were not asked yet: `await llm.ready()`.
        """
        return self._front.info

    @property
    def vectors(self) -> VectorRegistry:
        """Named vectors: register, list, remove. Raises RuntimeError before `ready()`."""
        return self._front.vectors

    @property
    def steering(self) -> Steering:
        """Edits of every request: set, clear, show. Raises RuntimeError before `ready()`."""
        return self._front.steering

    async def usage(self) -> dict[str, Any]:
        """What is in use: of each worker, its place, how full its arena is and what its steps came
        to; here, the requests that ask for something, those that wait for room, bytes that sinks
        have not written yet, and totals over all requests that have ended.

        Raises:
            RuntimeError: the workers were not asked yet: `await llm.ready()`.
        """
        return await self._front.usage()

    def sites(self) -> SiteTable:
        """Every site of every layer: tapped, not tapped (and the setting that would), or not in
        this model (and why). Raises RuntimeError before `ready()`.
        """
        return SiteTable.of(self.info.shape)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        capture: Any = None,
        steer: Any = None,
        edits: Any = None,
        probes: Any = None,
        **vllm_args: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates, capturing, editing and probing on the way.

        Args:
            prompt: one prompt; or an async generator of vLLM's `StreamingInput`, for a session,
                whose positions count on over all its inputs and what is generated between them.
            sampling_params: never changed. With n > 1 and a plan, `output_kind` must be
                FINAL_ONLY.
            request_id: the caller's name for it.
            capture: what to read: a `Capture` (or dict), or a list of such; or by sink, as
                `{"filesystem": FilesystemCaptureRequest(…)}`.
            steer: what to add: a `Steer` (or dict) or a list of them.
            edits: what to change: any of the operations (or dicts with `op`), or a list of them,
                applied in order, after those of `steer`.
            probes: what to score: a `Probe` (or dict) or a list of them.
            **vllm_args: whatever else vLLM's `generate` takes.

        Yields:
            vLLM's outputs, each with `activations`, `probes` and `receipt`. `probes` has all
            scores that are known: in an output that shows n generated tokens those of the first
            P + n − 1 positions, n counting from the beginning whatever the `output_kind`; the
            score of the request's last row, where a probe asks for `"last"`, comes with the last
            output only. Of captures with `stream` an output before the last has `activations`, at
            those same positions (without the last of them, where a capture of the request asks for
            `"last"`): with `CUMULATIVE` all so far, with `DELTA` those that no output before it
            had. The last output has `activations` of the whole, `capture_results` and `receipt`,
            exactly as `LLM.generate` returns them, once the sinks have what they were to get; on
            the others these are None. The last output of a request that was aborted has the scores
            that were known, and the rows as one before the last, and nothing else.

        Raises:
            SpecError: something asked for is malformed or impossible. Nothing was queued.
            ReceiptError: what was done for this request is not what was asked for.
        """
        await self.ready()
        arguments, front = CallArguments(capture, steer, edits, probes), self._front
        try:
            call, params = self._begin(prompt, sampling_params, arguments)
            if call.session is not None:
                prompt = with_call_plan(prompt, call.call_plan, params)
            stream = super().generate(prompt, params, request_id, **vllm_args)
            try:
                async for output in stream:
                    await front.completion.complete(call, output)
                    yield output
                last = await front.completion.close_session(call)
                if last is not None:
                    yield last
            finally:
                # If the caller has left, this has vLLM abort the request.
                try:
                    await stream.aclose()
                finally:
                    front.leave(call)
        except Exception as error:
            found = _own(error)
            if isinstance(found, SpecError):
                raise arguments.explain(found) from None
            if found is not None and found is not error:
                raise found from None
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine; see vLLM's."""
        front = getattr(self, "_front_end", None)
        if front is not None:
            front.close()
        super().shutdown(timeout=timeout)

    @property
    def _front(self) -> AsyncFrontEnd:
        if self._front_end is None:
            raise RuntimeError("the engine's workers were not asked yet: `await llm.ready()` first")
        return self._front_end

    def _begin(
        self, prompt: Any, sampling_params: SamplingParams, arguments: CallArguments
    ) -> tuple[GenerateCall, SamplingParams]:
        """Begin a call, and return its sampling parameters; the caller's are not changed."""
        plan = merged_plan(arguments.alone().plan(), sampling_params)
        if isinstance(prompt, EngineCoreRequest):
            if plan is not None or self._front.concerns(sampling_params):
                raise SpecError(
                    "prompt", "an EngineCoreRequest bypasses request validation; give the prompt"
                )
            return GenerateCall(CallPlan(None)), sampling_params
        session = InputSession() if isinstance(prompt, AsyncGenerator) else None
        if isinstance(plan, CallPlan):
            # The server attached it to a copy of its own.
            return self._front.begin(plan, session), sampling_params
        call_plan = CallPlan(plan)
        return self._front.begin(call_plan, session), with_plan(sampling_params, call_plan)


def _of_engine_args(
    args: AsyncEngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
) -> dict[str, Any]:
    """What vLLM's class is made of, as its own `from_engine_args` has it."""
    vllm_config = args.create_engine_config(usage_context)
    return {
        "vllm_config": vllm_config,
        "executor_class": Executor.get_class(vllm_config),
        "log_requests": args.enable_log_requests,
        "log_stats": not args.disable_log_stats,
        "usage_context": usage_context,
    }


def _own(error: BaseException | None) -> MidstreamError | None:
    """The error of midstream's that vLLM wrapped into its own, if there is one."""
    while error is not None:
        if isinstance(error, MidstreamError):
            return error
        error = error.__cause__
    return None
