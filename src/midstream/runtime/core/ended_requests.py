"""Requests that midstream ends in the engine core: as the front end asks, and the last output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.runtime.protocol.request_payload import uid_of
from midstream.runtime.protocol.rpc import StopRequests
from midstream.runtime.vllm.attributes import STOP_REASONS


def stop_later(scheduler: Any, asked: StopRequests) -> None:
    """Let running requests end as stopped, with the tokens of the step that is taken next.

    Args:
        scheduler: vLLM's Scheduler.
        asked: the requests. Those that have ended are ignored.
    """
    reasons = STOP_REASONS.get(scheduler) or {}
    for name in asked.request_ids:
        request = scheduler.requests.get(name)
        if request is not None and uid_of(request.sampling_params) == asked.uid:
            reasons[name] = asked.reason
    STOP_REASONS.set(scheduler, reasons)


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """Call vLLM's `Scheduler.update_from_output`, and end the requests of `stop_later`."""
    outputs = original(scheduler, scheduled, output)
    reasons = STOP_REASONS.get(scheduler)
    if not reasons:
        return outputs
    from vllm.v1.request import RequestStatus

    STOP_REASONS.set(scheduler, {})
    running = [request for name in reasons if (request := scheduler.requests.get(name)) is not None]
    for request in running:
        if scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_STOPPED):
            add_end(outputs, request, reasons[request.request_id])
    return outputs


def add_end(outputs: Any, request: Any, stop_reason: str, prompt_logprobs: Any = None) -> None:
    """Add an output without tokens to the outputs of a step, which ends a request.

    Args:
        outputs: what `Scheduler.update_from_output` returned: EngineCoreOutputs by client.
        request: vLLM's Request, which the scheduler has finished.
        stop_reason: the stop reason of its completion.
        prompt_logprobs: vLLM's LogprobsTensors of its prompt, if the step computed the last.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    mine = outputs.setdefault(request.client_index, EngineCoreOutputs())
    mine.outputs.append(
        EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            new_prompt_logprobs_tensors=prompt_logprobs,
            finish_reason=request.get_finished_reason(),
            stop_reason=stop_reason,
            events=request.take_events(),
            prefill_stats=request.take_prefill_stats(),
        )
    )
