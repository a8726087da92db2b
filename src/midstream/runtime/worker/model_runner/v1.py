"""vLLM's V1 model runner (`vllm.v1.worker.gpu_model_runner`), which is also the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from midstream.runtime.worker.model_runner.hooks import Hooks, report_failures
from midstream.runtime.worker.step.step_batch import StepBatch


def attach(runner: Any, hooks: Hooks) -> None:
    """Wrap `_update_states` (requests begin and end) and `_model_forward`.

    `_model_forward` is called for real steps only: dummy, profiling and graph-capture runs call
    the model themselves.
    """
    update_states: Callable[[Any], Any] = runner._update_states
    model_forward: Callable[..., Any] = runner._model_forward

    def update_states_hooked(scheduler_output: Any) -> Any:
        hooks.on_schedule(scheduler_output)
        return update_states(scheduler_output)

    def model_forward_hooked(*args: Any, **kwargs: Any) -> Any:
        hooks.before_forward(_batch(runner, hooks))
        out = model_forward(*args, **kwargs)
        hooks.after_forward()
        return out

    runner._update_states = update_states_hooked
    runner._model_forward = model_forward_hooked
    report_failures(runner, hooks)


def _batch(runner: Any, hooks: Hooks) -> StepBatch:
    batch = runner.input_batch
    num_requests = batch.num_reqs
    starts = runner.query_start_loc.np[: num_requests + 1]
    num_tokens = int(starts[-1])
    request_ids = batch.req_ids[:num_requests]
    return StepBatch(
        request_ids=request_ids,
        scheduled=np.diff(starts),
        computed=batch.num_computed_tokens_cpu[:num_requests],
        num_tokens=num_tokens,
        token_ids=lambda: runner.input_ids.gpu[:num_tokens],
        unknown=hooks.unknown_positions(request_ids, lambda: runner.positions[:num_tokens]),
    )
