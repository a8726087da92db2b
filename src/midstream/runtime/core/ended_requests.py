"""Requests that midstream ends in the engine core: as the front end asks, and the last output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.runtime.protocol.request_payload import uid_of
from midstream.runtime.protocol.rpc import StopRequests
from midstream.runtime.vllm.attributes import STOPS


def stop_later(scheduler: Any, asked: StopRequests) -> None:
    """Let running requests end with the tokens of the step that is taken next."""
    stops = STOPS.get(scheduler) or {}
    for name in asked.request_ids:
        request = scheduler.requests.get(name)
        if request is not None and uid_of(request.sampling_params) == asked.uid:
            stops[name] = asked.reason, asked.is_error
    STOPS.set(scheduler, stops)


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """Call vLLM's `Scheduler.update_from_output`, and end the requests of `stop_later`."""
    outputs = original(scheduler, scheduled, output)
    stops = STOPS.get(scheduler)
    if not stops:
        return outputs
    STOPS.set(scheduler, {})
    for name, (reason, is_error) in stops.items():
        for request in finish(scheduler, name, is_error):
            add_end(outputs, request, reason)
    return outputs


def finish(scheduler: Any, name: str, is_error: bool) -> Any:
    """Finish a request, with an error or as stopped; return a list of it, or of none."""
    from vllm.v1.request import RequestStatus

    status = RequestStatus.FINISHED_ERROR if is_error else RequestStatus.FINISHED_STOPPED
    return scheduler.finish_requests([name], status)


def add_end(outputs: Any, request: Any, stop_reason: str, prompt_logprobs: Any = None) -> None:
    """Add an output without tokens to the outputs of a step, by client, for a request that the
    scheduler has finished. `prompt_logprobs`: of its prompt, if the step computed the last.
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
