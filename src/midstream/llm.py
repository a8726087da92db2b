"""`midstream.LLM`: a `vllm.LLM` whose `generate` and `chat` also capture and steer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from vllm import LLM as VllmLLM
from vllm import RequestOutput, SamplingParams

from midstream.config import KEY, Config, from_environment
from midstream.defaults import DefaultCapture
from midstream.errors import ConfigError, SpecError
from midstream.runtime import patches
from midstream.runtime.frontend import EngineInfo
from midstream.runtime.prompts import count_conversations, count_prompts
from midstream.spec import Capture, Plan, Steer

CaptureLike = Capture | dict[str, Any]
SteerLike = Steer | dict[str, Any]


class LLM(VllmLLM):
    """vLLM's offline engine, with midstream enabled.

    Takes all that `vllm.LLM` takes, and:

    Args:
        model: name or path of the model.
        midstream: settings, a `Config` or a dict of its fields: what to tap and how much room
            there is. Default: `resid_post` at every layer (and whatever the environment variable
            `MIDSTREAM` says).
        layers: layers to capture by default, a list or "all". Every output then has
            `hidden_states[layer]` and `prefill_hidden_states[layer]`, [rows, hidden], taken at
            `resid_post`.
        include_prefill: with `layers`: fill `prefill_hidden_states` with the prompt's rows.
        include_decode: with `layers`: fill `hidden_states` with the generated tokens' rows. The
            last generated token is never computed on, so there is one row fewer than tokens.
        last_prefill_token: only the prompt's last row (implies `include_prefill`).
        last_decode_token: only the last row of the generated tokens.

    Raises:
        ConfigError: a wrong setting.
        UnsupportedError: this vLLM, model or engine setting cannot be served rightly.
    """

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
        **vllm_args: Any,
    ) -> None:
        given = dict(vllm_args.pop("additional_config", None) or {})
        if midstream is not None and given.get(KEY) is not None:
            raise ConfigError(f"{KEY}: settings are in `midstream` and in `additional_config`")
        settings = midstream if midstream is not None else given.get(KEY)
        if settings is None:
            settings = from_environment() or Config()
        given[KEY] = Config.parse(settings).to_dict()
        self._default_capture: DefaultCapture | None = None
        if layers is not None:
            self._default_capture = DefaultCapture.parse(
                layers, include_prefill, include_decode, last_prefill_token, last_decode_token
            )
        patches.activate()
        super().__init__(model, additional_config=given, **vllm_args)
        self._front_end = patches.front_end(self.llm_engine)

    @property
    def info(self) -> EngineInfo:
        """What the workers said of themselves: model shape, taps, dtype, runner, room."""
        info: EngineInfo = self._front_end.info
        return info

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        capture: CaptureLike | Sequence[Any] | None = None,
        steer: SteerLike | Sequence[Any] | None = None,
        **vllm_args: Any,
    ) -> list[RequestOutput]:
        """Generates as `vllm.LLM.generate` does, and captures and steers on the way.

        Args:
            prompts: one prompt or a list.
            sampling_params: for all, or one per prompt. Never changed.
            capture: what to capture: one `Capture` (or dict) for all prompts, or a list with one
                entry per prompt: a `Capture`, a list of them, or None for nothing.
            steer: what to add: one `Steer` (or dict) or a list of them for all prompts, or a list
                with one entry per prompt: a list of `Steer`, or None for nothing.
            **vllm_args: whatever else `vllm.LLM.generate` takes.

        Returns:
            One output per prompt, in order. Each has `activations` (`Activations` or None) and
            `receipt` (`Receipt` or None); with n > 1 these are on each of its `outputs` instead.

        Raises:
            SpecError: something asked for is malformed or impossible. Prompts of the call that were
                queued before it are taken back.
            ReceiptError: what was done is not what was asked for.
        """
        count = count_prompts(prompts)
        params = self._with_plans(count, sampling_params, capture, steer)
        return self._run(
            lambda: super(LLM, self).generate(prompts, sampling_params=params, **vllm_args),
            capture,
            steer,
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *args: Any,
        capture: CaptureLike | Sequence[Any] | None = None,
        steer: SteerLike | Sequence[Any] | None = None,
        **vllm_args: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for conversations; see `vllm.LLM.chat` for the arguments of its own."""
        count = count_conversations(messages)
        params = self._with_plans(count, sampling_params, capture, steer)
        return self._run(
            lambda: super(LLM, self).chat(messages, params, *args, **vllm_args), capture, steer
        )

    def _run(
        self, work: Callable[[], list[RequestOutput]], capture: Any, steer: Any
    ) -> list[RequestOutput]:
        before = self.request_counter.counter
        try:
            outputs = work()
        except BaseException as error:
            # Left running, this call's requests would come back with the next call's.
            mine = [str(nth) for nth in range(before, self.request_counter.counter)]
            self.llm_engine.abort_request(mine)
            self._front_end.drop(set(mine))
            if isinstance(error, SpecError):
                nth = self.request_counter.counter - before - 1
                raise _at_prompt(error, nth, capture, steer) from None
            raise
        if self._default_capture is not None:
            for output in outputs:
                self._default_capture.put_on(output, self.info.shape.num_layers)
        return outputs

    def _with_plans(
        self,
        count: int,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        capture: Any,
        steer: Any,
    ) -> list[SamplingParams]:
        """One SamplingParams per prompt, each with its plan; the caller's are not touched."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            given = [sampling_params] * count
        else:
            given = list(sampling_params)
            if len(given) != count:
                raise SpecError(
                    "sampling_params", f"{len(given)} for {count} prompts; give one, or one each"
                )
        captures = per_prompt("capture", capture, count)
        steers = per_prompt("steer", steer, count)
        made: dict[tuple[int, int, int], SamplingParams] = {}
        out = []
        for nth, params in enumerate(given):
            # Shared inputs give shared plans, so that a thousand prompts parse one plan once.
            key = (id(params), id(captures[nth]), id(steers[nth]))
            if key not in made:
                try:
                    made[key] = self._with_plan(params, captures[nth], steers[nth])
                except SpecError as error:
                    raise _at_prompt(error, nth, capture, steer) from None
            out.append(made[key])
        return out

    def _with_plan(self, params: SamplingParams, capture: Any, steer: Any) -> SamplingParams:
        carried = (params.extra_args or {}).get(KEY)
        if carried is not None and (capture is not None or steer is not None):
            raise SpecError(
                f"sampling_params.extra_args[{KEY!r}]",
                "there is a plan here and in capture= or steer=; give it in one place",
            )
        if carried is None:
            plan = Plan.make(capture=capture, edits=_named(steer))
        else:
            plan = patches.plan_of(params)
        if self._default_capture is not None:
            plan = self._default_capture.join(plan, params.max_tokens)
        # vLLM's offline engine itself sets fields of what it is given.
        own = copy.copy(params)
        if plan is not None:
            own.extra_args = {**(params.extra_args or {}), KEY: plan}
        return own


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """What each of `count` prompts is given, from one value for all or a list of one each.

    `steer` may be a flat list of edits, which is for all prompts; a list that holds None or lists
    is one entry per prompt. A flat list as long as there are prompts is refused as ambiguous.

    Raises:
        SpecError: a list that is neither.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if name == "steer" and not _is_per_prompt(value):
        if len(value) == count > 1:
            raise SpecError(
                name,
                f"{count} edits for {count} prompts can be read two ways; give one list per "
                "prompt: [[a], [b]] for one edit each, [[a, b], [a, b]] for all of them each",
            )
        return [value] * count
    if len(value) != count:
        raise SpecError(name, f"{len(value)} entries for {count} prompts; give one, or one each")
    return list(value)


def _named(steer: Any) -> Any:
    """Dicts under `steer=` need not say that they steer; in a plan, which holds other edits too,
    they do.
    """
    if isinstance(steer, dict):
        return {"op": "steer", **steer}
    if isinstance(steer, (list, tuple)):
        return [_named(one) for one in steer]
    return steer


def _at_prompt(error: SpecError, nth: int, capture: Any, steer: Any) -> SpecError:
    """The error as the caller wrote the field: `steer[3][0].layer` where there is one list per
    prompt; where one value is for all, the message says for which prompt it is wrong.
    """
    head, rest = re.match(r"([a-z_]*)(.*)", error.path, re.DOTALL).groups()  # type: ignore[union-attr]
    name = {"edits": "steer"}.get(head, head)
    value = {"capture": capture, "steer": steer}.get(name)
    if value is None:
        return error
    if isinstance(value, (list, tuple)) and (name == "capture" or _is_per_prompt(value)):
        mine = value[nth]
        path = f"{name}[{nth}]"
    else:
        mine, path = value, name
    # A plan counts its parts even where the caller gave a single one.
    if not isinstance(mine, (list, tuple)):
        rest = rest.removeprefix("[0]")
    problem = error.problem if path != name else f"{error.problem} (prompt {nth})"
    return SpecError(path + rest, problem)


def _is_per_prompt(steer: Sequence[Any]) -> bool:
    return any(entry is None or isinstance(entry, (list, tuple)) for entry in steer)
