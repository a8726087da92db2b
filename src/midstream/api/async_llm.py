"""`midstream.AsyncLLM`: vLLM's `AsyncLLM`, whose `generate` also captures, edits and probes."""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from vllm import AsyncEngineArgs, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM
from vllm.v1.executor.abstract import Executor

from midstream.api.arguments import (
    CallArguments,
    CaptureArgument,
    ControllerArgument,
    EditArgument,
    ProbeArgument,
    check_engine_names,
)
from midstream.api.async_call import AsyncEngineCall
from midstream.api.default_capture import DefaultCapture
from midstream.api.outputs import StreamedOutput
from midstream.api.registered import AsyncLenses, AsyncSaes
from midstream.api.updates import AsyncUpdates
from midstream.config.config import KEY, Config, from_additional_config
from midstream.errors import ConfigError
from midstream.plan.control.controller import Controller
from midstream.results.site_table import SiteTable
from midstream.runtime import install
from midstream.runtime.frontend import tracing
from midstream.runtime.frontend.async_frontend import AsyncFrontEnd
from midstream.runtime.frontend.engine_death import fail_streams
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.request.intake import Intake
from midstream.runtime.frontend.rpc.replicas import call_all, check_loop
from midstream.runtime.frontend.weight_memory import from_settings
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import with_midstream
from midstream.runtime.vllm.engine_rules import check_model, check_script, named_model
from midstream.sinks.server_captures import ServerCaptures
from midstream.steering import VectorRegistry
from midstream.steering.guards import Guards
from midstream.steering.tiers import Steering

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from midstream.api.vllm_arguments import AsyncEngineArguments, AsyncGenerateArguments

Engine = TypeVar("Engine", bound="AsyncLLM")


class AsyncRegistries:
    """Registries of an `AsyncLLM`: named vectors, lenses, SAEs, server-wide edits and captures."""

    @property
    def _front(self) -> AsyncFrontEnd:
        raise NotImplementedError

    @property
    def vectors(self) -> VectorRegistry:
        """Named vectors: register, list, remove. Raises RuntimeError before `ready()`."""
        return self._front.vectors

    @property
    def steering(self) -> Steering:
        """Server-wide edits: set, clear, show. Raises RuntimeError before `ready()`."""
        return self._front.steering

    @property
    def guards(self) -> Guards:
        """Guards of its server: put, promote, rollback. Raises RuntimeError before `ready()`."""
        return self._front.guards

    @property
    def lenses(self) -> AsyncLenses:
        """Registered lenses: register, remove, names. Raises RuntimeError before `ready()`."""
        return AsyncLenses(self._front)

    @property
    def saes(self) -> AsyncSaes:
        """Registered SAEs: register, remove, names. Raises RuntimeError before `ready()`."""
        return AsyncSaes(self._front.saes)

    @property
    def captures(self) -> ServerCaptures:
        """Server-wide captures: set, clear, list, collect."""
        return self._front.captures


class AsyncLLM(AsyncRegistries, AsyncUpdates, VllmAsyncLLM):
    """vLLM's asynchronous engine, with midstream enabled.

    The engine core runs in a process of its own. `info`, `vectors`, `steering` and `sites()` are
    available after `await llm.ready()`, or after the first `generate`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        midstream: Config | dict[str, Any] | None = None,
        layers: Sequence[int] | Sequence[str] | str | None = None,
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        last_token_row: bool = False,
        enable_steering: bool = False,
        **engine_args: Unpack[AsyncEngineArguments],
    ) -> None:
        """Start an engine. `from_engine_args` starts one from vLLM's own `AsyncEngineArgs`.

        Args:
            model: name or path of the model.
            midstream: settings, a `Config` or a dict of its fields. Default: `resid_post` at every
                layer, and the settings in the environment variable `MIDSTREAM`.
            layers: layers to capture by default. Every output then has `hidden_states` and
                `prefill_hidden_states`, which grow with its tokens; this and the next five are as
                for `midstream.LLM`.
            include_prefill: fill `prefill_hidden_states` with the prompt's rows.
            include_decode: fill `hidden_states` with the generated tokens' rows.
            last_prefill_token: only the prompt's last row.
            last_decode_token: only the last row of the generated tokens.
            last_token_row: add the row of the last generated token, on the last output.
            enable_steering: tap all three residual sites. Settings in `midstream` take precedence.
            **engine_args: arguments of `vllm.AsyncEngineArgs`. Or, instead of all of these, those
                of vLLM's class: `vllm_config`, `executor_class`, `log_stats`, …

        Raises:
            ConfigError: a setting is invalid, or there is no such folder.
            SpecError: there is no such argument.
            UnsupportedError: this vLLM, the model or an engine setting is unsupported.
        """
        if model is not None:
            check_model(model)
        theirs = (VllmAsyncLLM.__init__, AsyncLLM.__init__, AsyncEngineArgs)
        check_engine_names("AsyncLLM", engine_args, *theirs)
        self._default_capture: DefaultCapture | None = None
        if layers is not None:
            self._default_capture = DefaultCapture.parse(
                layers, include_prefill, include_decode, last_prefill_token, last_decode_token,
                last_token_row,
            )  # fmt: skip
        install.activate()
        check_script()
        seams.check("async")
        if "vllm_config" in engine_args:
            made = dict[str, Any](engine_args)
            if model is not None or midstream is not None or enable_steering:
                raise ConfigError(
                    f"{KEY}: model, midstream and enable_steering must be omitted with a "
                    "vllm_config, which has all settings"
                )
        else:
            arguments = dict[str, Any](engine_args) | ({} if model is None else {"model": model})
            config = with_midstream(
                arguments.pop("additional_config", None), midstream, enable_steering
            )
            with named_model(model):
                args = AsyncEngineArgs(**arguments, additional_config=config)
                made = _of_engine_args(args)
        if from_additional_config(made["vllm_config"].additional_config) is None:
            raise ConfigError(
                f"{KEY}: this vllm_config does not enable midstream; create it with "
                f'additional_config={{"{KEY}": {{}}}}'
            )
        super().__init__(**made)
        self._front_end: AsyncFrontEnd | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_engine_args(
        cls: type[Engine],
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Any = None,
    ) -> Engine:
        """Start an engine from vLLM's `AsyncEngineArgs`.

        If their `additional_config` does not name midstream, it has its default settings.

        Raises:
            ConfigError: a setting is invalid.
            UnsupportedError: this vLLM, the model or an engine setting is unsupported.
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
        """Ask the workers for their descriptions, once. `generate` calls this.

        Raises:
            UnsupportedError: nothing is tapped.
        """
        async with self._starting:
            if self._front_end is None:
                client = self.engine_core
                # A proxy: the engine's tasks must not keep it alive; see `_run_output_handler`.
                front = await AsyncFrontEnd.start(weakref.proxy(self), client)
                front.weights.write = functools.partial(call_all, client)
                for message in from_settings((front.lenses, front.saes), self.vllm_config):
                    await front.weights.write(message)
                deliver = client.add_request_async
                # Replaced on this client alone.
                client.add_request_async = lambda request: front.send(request, deliver)
                install.set_front_end(self, front)
                tracing.delay_spans(self.output_processor, front.spans_of)
                self._front_end = front

    @property
    def info(self) -> EngineInfo:
        """Model shape, taps, dtype, runner, capacity. Raises RuntimeError before `ready()`."""
        return self._front.info

    async def usage(self, timeout: float | None = None) -> dict[str, Any]:
        """Return what is in use, and totals over all ended requests.

        Of each worker: its place, the usage of its arena, and counts of its steps. Of the front
        end: requests with a plan, requests that wait for capacity, bytes that sinks have not
        written yet. If the workers do not answer within `timeout` seconds, their last answers;
        `workers_age_seconds` is their age, and None if there are none.

        Raises:
            RuntimeError: before `await llm.ready()`.
        """
        return await self._front.usage(timeout)

    def sites(self) -> SiteTable:
        """Return all sites: tapped, or the reason why not. RuntimeError before `ready()`."""
        return SiteTable.of(self.info.shape)

    async def parameter(self, name: str) -> Tensor:
        """Return a parameter; see `LLM.parameter`. Raises RuntimeError before `ready()`."""
        return await self._front.parameter(name)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        capture: CaptureArgument = None,
        steer: EditArgument = None,
        edits: EditArgument = None,
        probes: ProbeArgument = None,
        controller: ControllerArgument = None,
        **vllm_args: Unpack[AsyncGenerateArguments],
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Generate, with captures, edits and probes.

        Args:
            prompt: one prompt; or an async generator of vLLM's `StreamingInput`, for a session,
                whose positions count on over all its inputs and what is generated between them.
            sampling_params: never changed. With n > 1 and a plan, `output_kind` must be
                FINAL_ONLY.
            request_id: the caller's id of the request; None: a random one.
            capture: a `Capture` or its dict, or a list of them; or by sink, as
                `{"filesystem": FilesystemCaptureRequest(…)}`.
            steer: a `Steer` or its dict, or a list of them.
            edits: an operation or its dict with `op`, or a list of them; applied in order, after
                those of `steer`.
            probes: a `Probe` or its dict, or a list of them.
            controller: changes the edits by the scores of the probes. A `Controller` with
                `mode="async"` runs beside the engine, and needs n = 1 and outputs before the last.
                The others run in the engine core between two steps: see `LLM.generate`.
            **vllm_args: other arguments of vLLM's `generate`.

        Yields:
            vLLM's outputs, each with `activations`, `probes` and `receipt`. `probes` has all known
            scores: in an output that shows n generated tokens, those of the first P + n − 1
            positions, where n counts from the beginning with any `output_kind`. The score of the
            request's last row, if a probe selects `"last_row"`, is in the last output only. Before
            the last, an output has `activations` of the captures with `stream`, at the same
            positions (without the last of these if a capture of the request selects `"last_row"`):
            with `CUMULATIVE` all so far, with `DELTA` those that no earlier output had. The last
            output has all `activations`, `capture_results` and `receipt`, as `LLM.generate` returns
            them, once the sinks have their rows; on the others these are None. The last output of
            an aborted request has the known scores, the rows as an output before the last, and
            nothing else. With `AsyncLLM(layers=…)` each output also has `hidden_states` and
            `prefill_hidden_states`: the rows of `activations` of the default capture, by layer.

        Raises:
            SpecError: an argument is malformed, or the plan cannot be carried out. Nothing was
                queued.
            ReceiptError: results differ from the plan.
            RuntimeError: this is not the engine's event loop.
        """
        beside, within = None, controller
        if isinstance(controller, Controller) and controller.mode == "async":
            beside, within = controller, None
        arguments = CallArguments(capture, steer, edits, probes, within)
        # The generator itself, not one around it, which would take time for each output. Nothing of
        # the call is done before it is read.
        call = AsyncEngineCall(self, self._started, arguments, beside)
        return call.outputs(prompt, sampling_params, request_id, vllm_args)

    async def _started(self) -> tuple[AsyncFrontEnd, DefaultCapture | None]:
        """Return the front end, once it exists, and the capture of every request now."""
        check_loop(self.engine_core)
        if self._front_end is None:
            await self.ready()
        return self._front, self._default_capture

    def remove_hooks(self) -> None:
        """End the capture of `AsyncLLM(layers=…)`: outputs of later calls have no `hidden_states`.

        The taps stay in the model, and calls can capture as before. Does nothing without `layers`.
        """
        self._default_capture = None

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the engine down; see vLLM's `AsyncLLM.shutdown`. New plans raise `BusyError`."""
        timeout = _close(getattr(self, "_front_end", None), timeout)
        super().shutdown(timeout=timeout)
        fail_streams(self)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the functions that vLLM's method calls may be gone. The processes
        # and the sinks have been closed by their own handlers then.
        if not is_ending():
            super().__del__()

    @property
    def intake(self) -> Intake:
        """Limits on waiting requests with a plan. Raises RuntimeError before `ready()`."""
        return self._front.intake

    @property
    def _front(self) -> AsyncFrontEnd:
        if self._front_end is None:
            raise RuntimeError("the engine is not ready: call `await llm.ready()` first")
        return self._front_end


def _of_engine_args(
    args: AsyncEngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
) -> dict[str, Any]:
    """Return the arguments of vLLM's class, as its own `from_engine_args` makes them."""
    vllm_config = args.create_engine_config(usage_context)
    return {
        "vllm_config": vllm_config,
        "executor_class": Executor.get_class(vllm_config),
        "log_requests": args.enable_log_requests,
        "log_stats": not args.disable_log_stats,
        "usage_context": usage_context,
    }


def _close(front: AsyncFrontEnd | None, timeout: float | None) -> float | None:
    """Close a front end; return what is left of the timeout. Calls with a plan may end within it,
    before the engine rejects RPCs, unless this blocks the event loop's own thread.
    """
    if front is None:
        return timeout
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        timeout = front.intake.drain(timeout, front.has_calls) if timeout else timeout
    front.close()
    return timeout
