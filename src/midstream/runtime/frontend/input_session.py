"""Sessions of streaming input: one request, whose prompt grows by inputs and answers."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.errors import SpecError
from midstream.plan import Plan, ResolvedPlan
from midstream.runtime.frontend.request.call_plan import CallPlan, has_plan, plan_of, with_plan
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.results import WorkerAnswers


@dataclass(eq=False, slots=True)
class InputSession:
    """State of one session."""

    inputs: list[list[int]] = field(default_factory=list)  # token ids of each input so far
    payload: RequestPayload | None = None  # of every input; None: no plan applies
    latest: Any = None


def check_session(plan: Plan | None) -> None:
    """Check that no capture has `stream` or `reuse`, which sessions do not support."""
    for index, capture in enumerate(() if plan is None else plan.captures):
        if capture.stream:
            raise SpecError(
                f"capture[{index}].stream",
                "rows of a session of streaming input come with its last output",
            )
        if capture.reuse:
            raise SpecError(
                f"capture[{index}].reuse",
                "the prompt of a session of streaming input grows, so that every row is computed; "
                "omit `reuse`",
            )


async def with_call_plan(
    stream: AsyncGenerator[Any, None], plan: CallPlan, call_params: Any
) -> AsyncGenerator[Any, None]:
    """Yield the caller's inputs; copies of their sampling parameters have the call's plan."""
    async for streaming_input in stream:
        params = streaming_input.sampling_params
        if params is None:
            yield streaming_input
            continue
        if has_plan(params) or plan_of(params) is not None:
            raise SpecError(
                "sampling_params.extra_args",
                "an input of a session cannot bring a plan of its own; give one for the whole "
                "session with the call",
            )
        if params.output_kind != call_params.output_kind:
            raise SpecError(
                "sampling_params.output_kind",
                f"an input of a session with {params.output_kind.name}, in a call with "
                f"{call_params.output_kind.name}; give both the same",
            )
        yield replace(streaming_input, sampling_params=with_plan(params, plan))


def closing(session: InputSession, is_delta: bool) -> Any:
    """Return a last output for a session that vLLM ended without one; None if it had no output, or
    has its last one. It repeats the latest; with DELTA, without its text, tokens and logprobs.
    """
    if session.latest is None or session.latest.finished:
        return None
    output = copy.copy(session.latest)
    output.finished = True
    output.outputs = [copy.copy(output.outputs[0])]
    if is_delta:
        last = output.outputs[0]
        last.text, last.token_ids = "", []
        last.logprobs = None if last.logprobs is None else last.logprobs[:0]
    return output


def as_one_request(
    output: Any,
    generated: list[int],
    inputs: list[list[int]],
    plan: ResolvedPlan,
    answers: WorkerAnswers,
) -> tuple[Any, ResolvedPlan]:
    """Return a session's last output and plan as those of one request, whose prompt is all computed
    before the last turn generated: it has P + G − 1 rows. `generated` has tokens too that were
    never computed on. A prompt in `answers` that does not consist of inputs and generated tokens is
    a problem there.
    """
    entries = [request for answer in answers for request in answer.header.requests]
    prompt, turns = list(inputs[0]), [len(inputs[0])]
    for entry in entries[:1]:
        prompt = entry.prompt or prompt
        turns = sorted({*turns, *entry.turns})
    used = _used(inputs, generated, prompt, turns)
    if used is None:
        for entry in entries:
            entry.problem = entry.problem or (
                "what the session computed on is not its inputs and what was generated"
            )
    whole = copy.copy(output)
    whole.prompt_token_ids = prompt
    whole.outputs = [copy.copy(output.outputs[0])]
    whole.outputs[0].token_ids = generated[used or 0 :]
    return whole, replace(plan, prompt_len=len(prompt))


def _used(
    inputs: list[list[int]], generated: list[int], prompt: list[int], turns: list[int]
) -> int | None:
    """Return how many generated tokens are of turns before the last; None: they contradict it."""
    if len(turns) != len(inputs) or prompt[: turns[0]] != inputs[0] or len(prompt) != turns[-1]:
        return None
    used = 0
    for ids, before, after in zip(inputs[1:], turns, turns[1:], strict=False):
        middle = after - len(ids)
        kept = prompt[before:middle]
        if middle < before or prompt[middle:after] != ids:
            return None
        if kept != generated[used : used + len(kept)]:
            return None
        used += len(kept) + 1
    return used if used < len(generated) else None
