"""`midstream.LLM`: a `vllm.LLM` whose `generate` and `chat` also capture and steer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from vllm import LLM as VllmLLM
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from midstream.api.arguments import (
    CallArguments,
    CaptureArgument,
    ControllerArgument,
    EditArgument,
    ProbeArgument,
    check_engine_names,
    check_names,
)
from midstream.api.default_capture import DefaultCapture
from midstream.api.offline_call import OfflineCall
from midstream.api.outputs import GenerateOutput
from midstream.api.registered import Lenses, Saes
from midstream.api.updates import Updates
from midstream.compat.foreign_fields import OWN
from midstream.config.config import Config
from midstream.errors import SpecError, UnsupportedError
from midstream.plan import Plan
from midstream.plan.plan import beams_problem, read_prompts
from midstream.results.site_table import SiteTable
from midstream.runtime import install
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.prompt.inputs import conversations, list_prompts
from midstream.runtime.frontend.request.prompt.message_spans import template_arguments
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import with_midstream
from midstream.runtime.vllm.engine_rules import (
    check_model,
    check_offline,
    check_script,
    named_model,
)
from midstream.sinks.server_captures import ServerCaptures
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from midstream.api.vllm_arguments import ChatArguments, EngineArguments, GenerateArguments


class LLM(Updates, VllmLLM):
    """vLLM's offline engine, with midstream enabled."""

    def __init__(
        self,
        model: str,
        *,
        midstream: Config | dict[str, Any] | None = None,
        layers: Sequence[int] | Sequence[str] | str | None = None,
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        last_token_row: bool = False,
        enable_steering: bool = False,
        **vllm_args: Unpack[EngineArguments],
    ) -> None:
        """Start an engine. Takes the arguments of `vllm.LLM`, and:

        Args:
            model: name or path of the model.
            midstream: settings, a `Config` or a dict of its fields. Default: `resid_post` at every
                layer, and the settings in the environment variable `MIDSTREAM`.
            layers: layers to capture by default, a list or "all". Every output then has
                `hidden_states[layer]` and `prefill_hidden_states[layer]`, [rows, hidden], taken at
                `resid_post`.
            include_prefill: with `layers`: fill `prefill_hidden_states` with the prompt's rows.
            include_decode: with `layers`: fill `hidden_states` with the generated tokens' rows. The
                last generated token is never computed on, so there is one row fewer than tokens.
            last_prefill_token: only the prompt's last row (implies `include_prefill`).
            last_decode_token: only their last row.
            last_token_row: with `layers`: `hidden_states` also has the row of the last generated
                token, so there are as many rows as tokens. It takes a second request per
                completion. Rejected then: edits that select positions or a phase, names of vectors
                in the request, captures of every request, prompts of embeddings.
            enable_steering: tap all three residual sites, which are the hook points of
                `SamplingParams(steering_vectors=…)`. Settings in `midstream` take precedence.

        Raises:
            ConfigError: a setting is invalid, or there is no such folder.
            SpecError: there is no such argument, or `layers` has a layer that is not tapped.
            UnsupportedError: this vLLM, the model or an engine setting is unsupported.
        """
        check_model(model)
        check_engine_names("LLM", vllm_args, VllmLLM.__init__, LLM.__init__, EngineArgs)
        extra = with_midstream(vllm_args.pop("additional_config", None), midstream, enable_steering)
        self._default_capture: DefaultCapture | None = None
        if layers is not None:
            self._default_capture = DefaultCapture.parse(
                layers, include_prefill, include_decode, last_prefill_token, last_decode_token,
                last_token_row,
            )  # fmt: skip
        install.activate()
        check_script()
        seams.check("offline")
        check_offline(vllm_args.get("data_parallel_size", 1))
        with named_model(model):
            super().__init__(model, additional_config=extra, **vllm_args)
        self._front_end = install.front_end(self.llm_engine)
        if self._default_capture is not None:
            try:
                self._default_capture.check(self.info.shape)
            except SpecError:
                self.llm_engine.engine_core.shutdown()
                raise

    @property
    def info(self) -> EngineInfo:
        """Description of the engine: model shape, taps, dtype, runner, capacity."""
        return cast(EngineInfo, self._front_end.info)

    @property
    def vectors(self) -> VectorRegistry:
        """Named vectors: register, list, remove."""
        return cast(VectorRegistry, self._front_end.vectors)

    @property
    def lenses(self) -> Lenses:
        """Registered lenses: register, remove, names."""
        return Lenses(self._front_end.lenses, self._front_end.directions)

    @property
    def saes(self) -> Saes:
        """Registered sparse autoencoders: register, remove, names."""
        return Saes(self._front_end.saes)

    @property
    def steering(self) -> Steering:
        """Server-wide edits: set, clear, show."""
        return cast(Steering, self._front_end.steering)

    @property
    def captures(self) -> ServerCaptures:
        """Server-wide captures: set, clear, list, collect."""
        return cast(ServerCaptures, self._front_end.captures)

    def sites(self) -> SiteTable:
        """Return every site of every layer: tapped, or the reason why not."""
        return SiteTable.of(self.info.shape)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter of the model outside its decoder layers: embeddings, norms, head.

        It is read from the engine's weights and gathered over its ranks, in parts, between steps.

        Args:
            name: its name in the checkpoint, for example `lm_head.weight` or `model.norm.weight`.

        Returns:
            The whole parameter on the CPU, in its dtype; an embedding is [vocabulary, width].

        Raises:
            SpecError: there is no such parameter (the message names those that there are), or it is
                quantised.
            BusyError: the engine sleeps.
        """
        with self._front_end.use.call():
            return cast(Tensor, self._front_end.parameter(name))

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        capture: CaptureArgument = None,
        steer: EditArgument = None,
        edits: EditArgument = None,
        probes: ProbeArgument = None,
        controller: ControllerArgument = None,
        **vllm_args: Unpack[GenerateArguments],
    ) -> list[GenerateOutput]:
        """Generate, with captures, edits and probes.

        Each of `capture`, `steer`, `edits`, `probes` and `controller` is one value for all prompts,
        or a list with one entry each; None: nothing. `edits=[a, b]` means both edits for a single
        prompt; with several prompts, give lists, as in `edits=[[a, b]] * 3`.

        Args:
            prompts: one prompt or a list.
            sampling_params: for all, or one per prompt. Never changed.
            capture: a `Capture` or its dict; True or "all", layers as `[10, 20]`, or sites as
                `"blocks.10.hook_resid_post"`; per prompt one or a list of captures; or by sink, as
                `{"filesystem": FilesystemCaptureRequest(…)}`.
            steer, edits: an operation or its dict with `op`; a `Direction` or `Directions`, also
                times a number; `(vector, layer)`; or a list of these, those of `steer` first.
            probes: a `Probe` or its dict, or a list of them.
            controller: changes the edits by the probes' scores: a `Controller`, a `Threshold`, a
                dict, or a name of the setting `controllers`. With `mode="async"` it needs n = 1.
            **vllm_args: other arguments of `vllm.LLM.generate`.

        Returns:
            One output per prompt, in order, once the sinks have their rows. Each has what was
            asked for, which `print` names: `activations`, `probes`, `receipt`, `capture_results`
            by sink. Reading what was not asked for raises `NotAskedError`, an AttributeError that
            says how to ask. With n > 1 results are on each of the `outputs`.

        Raises:
            SpecError: an argument is malformed, or the plan cannot be carried out. Prompts of the
                call that were queued already are aborted.
            ReceiptError: results differ from their plan; it has the call's `outputs`.
            BusyError: another thread uses this LLM, or requests that were queued have not ended.
        """
        check_names("generate", vllm_args, VllmLLM.generate)
        arguments = CallArguments(capture, steer, edits, probes, controller)
        call = self._call(arguments, list_prompts(prompts))
        params = call.with_plans(sampling_params)
        return call.results(
            lambda: super(LLM, self).generate(prompts, sampling_params=params, **vllm_args), params
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *args: Any,
        capture: CaptureArgument = None,
        steer: EditArgument = None,
        edits: EditArgument = None,
        probes: ProbeArgument = None,
        controller: ControllerArgument = None,
        **vllm_args: Unpack[ChatArguments],
    ) -> list[GenerateOutput]:
        """Answer conversations; see `generate`, and `vllm.LLM.chat` for its other arguments.

        Positions may select messages: see `Role`.
        """
        check_names("chat", vllm_args, VllmLLM.chat)
        talks = conversations(messages)
        template = template_arguments(VllmLLM.chat, args, vllm_args)
        # vLLM's default is the template that the engine was created with.
        if template.get("chat_template") is None:
            template["chat_template"] = getattr(self, "chat_template", None)
        call = self._call(CallArguments(capture, steer, edits, probes, controller), talks)
        is_read = read_prompts(self.steering.plan_edits(), self.captures.current)
        params = call.with_plans(sampling_params, _plans_of_chats(talks, template, is_read))
        return call.results(
            lambda: super(LLM, self).chat(messages, params, *args, **vllm_args), params
        )

    def beam_search(self, *args: Any, **vllm_args: Any) -> Any:
        """Run beam search; see `vllm.LLM.beam_search`.

        Raises:
            SpecError: `capture`, `steer`, `edits` or `probes` is given.
            UnsupportedError: a server-wide edit or capture selects positions or phases, or a
                server-wide probe stops or switches. Each token is a request of its own here, with
                earlier tokens in its prompt.
        """
        for name in vllm_args:
            if name in OWN:
                raise SpecError(
                    name,
                    "unsupported in beam_search, which makes a separate request for each token; "
                    "use generate, or llm.steering for edits of every request",
                )
        check_names("beam_search", vllm_args, VllmLLM.beam_search)
        problem = beams_problem((*self.steering.plan_edits(), *self.captures.current))
        if problem is not None:
            raise UnsupportedError(problem)
        with self._front_end.use.whole_call():
            return super().beam_search(*args, **vllm_args)

    def enqueue(self, *args: Any, **vllm_args: Any) -> Any:
        """Queue prompts; see `vllm.LLM.enqueue`. Unsupported with `layers`."""
        self._check_no_default("enqueue")
        return super().enqueue(*args, **vllm_args)

    def enqueue_chat(self, *args: Any, **vllm_args: Any) -> Any:
        """Queue conversations; see `vllm.LLM.enqueue_chat`. Unsupported with `layers`."""
        self._check_no_default("enqueue_chat")
        return super().enqueue_chat(*args, **vllm_args)

    def remove_hooks(self) -> None:
        """End the capture of `LLM(layers=…)`: later outputs have no `hidden_states`.

        The taps stay in the model, and calls can capture as before. Does nothing without `layers`.
        """
        self._default_capture = None

    def _check_no_default(self, name: str) -> None:
        if self._default_capture is not None:
            raise UnsupportedError(
                f"{name} cannot capture for LLM(layers=…); use generate or chat, or give each "
                "request a plan"
            )

    def _call(self, arguments: CallArguments, prompts: Sequence[Any]) -> OfflineCall:
        return OfflineCall(self, self._front_end, self._default_capture, arguments, prompts)


def _of_one_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of vLLM's that calls the engine, refused while another thread uses it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **vllm_args: Any) -> Any:
        with self._front_end.use.call():
            return method(self, *args, **vllm_args)

    return run


# Those that add requests or step the engine are refused there.
for _name in (
    "collective_rpc", "apply_model", "sleep", "wake_up", "reset_prefix_cache", "reset_mm_cache",
    "start_profile", "stop_profile",
):  # fmt: skip
    setattr(LLM, _name, _of_one_thread(getattr(VllmLLM, _name)))


def _plans_of_chats(
    talks: Sequence[Any], template: Mapping[str, Any], is_read: bool
) -> Callable[[int, Plan | None], Plan | CallPlan | None]:
    """Return the function that attaches conversations to plans that need them, or to all."""

    def attached(index: int, plan: Plan | None) -> Plan | CallPlan | None:
        is_needed = is_read or (plan is not None and plan.needs_prompt)
        return CallPlan(plan, talks[index], template) if is_needed else plan

    return attached
