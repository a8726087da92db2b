"""Sessions of streaming input: one request whose prompt grows while it runs.

vLLM computes an input, generates after it, and when the next input comes goes on from there: what
was generated becomes prompt, but for the last token of each turn, which was sampled and is never
fed. So positions count on over the whole session. Where a step ran ahead on such a token, its row
is computed anew on the token that took its place.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.spec import Plan, ResolvedPlan

if TYPE_CHECKING:
    from midstream.runtime.frontend.call import GenerateCall


@dataclass(eq=False, slots=True)
class InputSession:
    """What is known of one session.

    Attributes:
        inputs: the token ids of each input so far.
        riding: what its inputs carry in `extra_args`; None: nothing is asked for.
        latest: its latest output.
    """

    inputs: list[list[int]] = field(default_factory=list)
    riding: list[object] | None = None
    latest: Any = None


def check_session(plan: Plan | None) -> None:
    """Whether rows are to be shown on the way, which those of a session are not.

    Raises:
        SpecError: they are.
    """
    for nth, capture in enumerate(() if plan is None else plan.captures):
        if capture.stream:
            raise SpecError(
                f"capture[{nth}].stream",
                "rows of a session of streaming input come with its last output",
            )


async def with_order(
    stream: AsyncGenerator[Any, None], order: GenerateCall, call_params: Any
) -> AsyncGenerator[Any, None]:
    """The caller's inputs; those with sampling parameters of their own carry the order as well.

    Raises:
        SpecError: an input brings a plan, or another output kind than the call's.
    """
    async for given in stream:
        params = given.sampling_params
        if params is None:
            yield given
            continue
        if KEY in (params.extra_args or {}):
            raise SpecError(
                f"sampling_params.extra_args[{KEY!r}]",
                "an input of a session cannot bring a plan of its own; give one for the whole "
                "session with the call",
            )
        if params.output_kind != call_params.output_kind:
            raise SpecError(
                "sampling_params.output_kind",
                f"an input of a session with {params.output_kind.name}, in a call with "
                f"{call_params.output_kind.name}; give both the same",
            )
        own = copy.copy(params)
        own.extra_args = {**(params.extra_args or {}), KEY: order}
        yield replace(given, sampling_params=own)


def closing(session: InputSession, is_delta: bool) -> Any:
    """The last output of a session that vLLM ended without one, as there was nothing new to show:
    its latest once more, with DELTA without what that showed. None where there was no output.
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
    output: Any, generated: list[int], order: GenerateCall, answers: WorkerAnswers
) -> tuple[Any, ResolvedPlan]:
    """A session's last output and plan as those of one request, whose prompt is all that was fed
    before the last turn generated: then P + G − 1 is the number of its rows.

    Args:
        output: vLLM's, which has the inputs for a prompt.
        generated: all that was generated, the tokens that were never fed among it.
        order: the call's.
        answers: of the workers, who know what the prompt has grown to. Where that is not made of
            the inputs and of what was generated, it is noted there as a problem.
    """
    assert order.asked is not None
    assert order.session is not None
    inputs = order.session.inputs
    entries = [entry for header, _ in answers for entry in header["requests"]]
    prompt, turns = list(inputs[0]), [len(inputs[0])]
    for entry in entries[:1]:
        prompt = entry["prompt"] or prompt
        turns = sorted({*turns, *entry["turns"]})
    used = _used(inputs, generated, prompt, turns)
    if used is None:
        for entry in entries:
            entry["problem"] = entry["problem"] or (
                "what the session computed on is not its inputs and what was generated"
            )
    whole = copy.copy(output)
    whole.prompt_token_ids = prompt
    whole.outputs = [copy.copy(output.outputs[0])]
    whole.outputs[0].token_ids = generated[used or 0 :]
    return whole, replace(order.asked.plan, prompt_len=len(prompt))


def _used(
    inputs: list[list[int]], generated: list[int], prompt: list[int], turns: list[int]
) -> int | None:
    """How many of the generated tokens belong to turns before the last; None where prompt and turns
    do not fit to the inputs and what was generated.

    Args:
        turns: how long the prompt was when each turn began to generate.
    """
    if len(turns) != len(inputs) or prompt[: turns[0]] != inputs[0] or len(prompt) != turns[-1]:
        return None
    used = 0
    for given, before, after in zip(inputs[1:], turns, turns[1:], strict=False):
        middle = after - len(given)
        kept = prompt[before:middle]
        if middle < before or prompt[middle:after] != given:
            return None
        if kept != generated[used : used + len(kept)]:
            return None
        used += len(kept) + 1
    return used if used < len(generated) else None
