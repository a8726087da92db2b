"""The last output of a request that midstream ends in the engine core."""

from __future__ import annotations

from typing import Any


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
