"""The row of a completion's last token, never computed on: one more request computes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from midstream.api.default_capture import DefaultCapture
from midstream.errors import SpecError, UnsupportedError
from midstream.plan import Plan, Positions
from midstream.runtime.frontend.request.call_plan import CallPlan, plan_of, with_plan

# Fields of a prompt that its token ids stand for, and those that belong to any request.
_TEXT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt", "type", "arrival_time"}
_ONE_TOKEN = SamplingParams(
    max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request for a last row reads of its engine."""

    num_layers: int
    max_model_len: int  # most tokens of a request, generated ones included

    @staticmethod
    def of(llm: Any, front_end: Any) -> EngineLimits:
        return EngineLimits(front_end.info.shape.num_layers, llm.model_config.max_model_len)


@dataclass(frozen=True, slots=True)
class LastTokenRequest:
    """The request that computes a completion's last row; the first's tokens are its prompt."""

    prompt: dict[str, Any]
    params: SamplingParams
    lora_request: Any
    completion: Any
    default: DefaultCapture
    num_layers: int

    def add(self, output: Any) -> None:
        self.default.add_last(self.completion, output.outputs[0].activations, self.num_layers)


def check(default: DefaultCapture, plan: Plan | None, front_end: Any) -> None:
    """Check that the second request would apply the same edits as the first, of this own plan."""
    if not default.last_token:
        return
    problem = (
        "with last_token_row, the last token is computed in a second request, in which generated "
        "tokens are part of the prompt; use edits of all positions"
    )
    for index, edit in enumerate(() if plan is None else plan.edits):
        if edit.positions != Positions():
            raise SpecError(f"edits[{index}].positions", problem)
        for name in edit.names():
            raise SpecError(
                f"edits[{index}]",
                f"with last_token_row, vectors must be given by value: {name!r} may stand for "
                "edits of some positions, or be registered anew before the second request",
            )
    if plan is not None and plan.switches:
        raise SpecError("probes", "with last_token_row, no probe may switch the edits (Switch)")
    if plan is not None and plan.controller is not None:
        check_controller(default)
    if any(edit.positions != Positions() for edit in front_end.steering.plan_edits()):
        raise UnsupportedError(f"a server-wide edit selects positions or phases: {problem}")
    _check_captures(front_end)


def check_controller(default: DefaultCapture | None) -> None:
    """Check that a request may have a controller, beside the capture of every request, if any."""
    if default is not None and default.last_token:
        raise SpecError("controller", "with last_token_row, no controller may change the edits")


def _check_captures(front_end: Any) -> None:
    if front_end.captures.current:
        raise UnsupportedError(
            "last_token_row needs a second request for each completion, which captures of every "
            "request would include; use captures by request"
        )


def check_epoch(epoch: int, front_end: Any) -> None:
    """Check, after the second request, that it had the server-wide edits of the first."""
    _check_captures(front_end)
    if front_end.steering.epoch != epoch:
        raise UnsupportedError(
            "last_token_row: the server-wide edits were changed while the request ran, so the last "
            "token's row would not have the same edits as the others"
        )


def check_prompts(default: DefaultCapture | None, prompts: Sequence[Any]) -> None:
    """Check that each prompt is text or token ids, so that its token ids are the whole of it."""
    if default is None or not default.last_token:
        return
    for index, prompt in enumerate(prompts):
        for field in sorted(_other_parts(prompt)):
            raise SpecError(
                f"prompts[{index}]",
                f"with last_token_row, a prompt must be text or token ids; got {field!r}",
            )


def _other_parts(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, Mapping) and "role" not in prompt:
        yield from (str(field) for field in prompt if field not in _TEXT_FIELDS)
    elif isinstance(prompt, (list, tuple)):
        for message in prompt:
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, (list, tuple)) else ():
                kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
                if kind != "text":
                    yield str(kind)


def requests_of(
    default: DefaultCapture,
    output: Any,
    prompt: Any,
    params: SamplingParams,
    limits: EngineLimits,
    generated: Sequence[int] | None = None,
) -> list[LastTokenRequest]:
    """Return the requests for the last rows of a finished output, one per completion. One without
    tokens, or that was aborted or failed, has none; one that fills `max_model_len` warns.
    """
    if not default.last_token:
        return []
    plan = plan_of(params)
    own = plan.plan if isinstance(plan, CallPlan) else plan
    again = default.plan_of_last(() if own is None else own.edits)
    requests = []
    for completion in output.outputs:
        tokens = list(completion.token_ids if generated is None else generated)
        if not tokens or completion.finish_reason in ("abort", "error"):
            continue
        whole = [*output.prompt_token_ids, *tokens]
        if len(whole) >= limits.max_model_len:
            warnings.warn(
                f"request {output.request_id}: last_token_row has no row for its last token, as it "
                f"fills max_model_len={limits.max_model_len}; give a smaller max_tokens",
                stacklevel=2,
            )
            continue
        tokens_prompt = {"prompt_token_ids": whole}
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            tokens_prompt["cache_salt"] = prompt["cache_salt"]
        one_token = with_plan(_ONE_TOKEN, again)
        lora = output.lora_request
        requests.append(
            LastTokenRequest(tokens_prompt, one_token, lora, completion, default, limits.num_layers)
        )
    return requests
