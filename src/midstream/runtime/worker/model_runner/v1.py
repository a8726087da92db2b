"""vLLM's V1 model runner (`vllm.v1.worker.gpu_model_runner`), which is also the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from midstream.runtime.worker.model_runner.hooks import Hooks, report_results
from midstream.runtime.worker.step.step_batch import StepBatch


def attach(runner: Any, hooks: Hooks) -> None:
    """Wrap `_update_states`, and `_model_forward`, which is called for real steps only."""
    update_states: Callable[[Any], Any] = runner._update_states
    model_forward: Callable[..., Any] = runner._model_forward

    def update_states_hooked(scheduler_output: Any) -> Any:
        nonfinite = hooks.on_schedule(scheduler_output)
        if nonfinite and runner.device.type == "cpu":
            _clear_nonfinite(runner, nonfinite)
        return update_states(scheduler_output)

    def model_forward_hooked(*args: Any, **kwargs: Any) -> Any:
        hooks.before_forward(_batch(runner, hooks))
        out = model_forward(*args, **kwargs)
        hooks.after_forward()
        return out

    runner._update_states = update_states_hooked
    runner._model_forward = model_forward_hooked
    report_results(runner, hooks)


def block_size(runner: Any, group: int) -> int:
    """Return the tokens of a block of a KV cache group."""
    size: int = runner.input_batch.block_table[group].block_size
    return size


def block_table(runner: Any, group: int) -> torch.Tensor:
    """Return the blocks of the requests of the batch, int32 [requests, blocks]."""
    batch = runner.input_batch
    table: torch.Tensor = batch.block_table[group].get_device_tensor(batch.num_reqs)
    return table


def _clear_nonfinite(runner: Any, request_ids: Iterable[str]) -> None:
    """Replace values that are not finite in the KV blocks of ended requests.

    vLLM's attention on a CPU multiplies what a reused block holds beyond a request's last token by
    a weight of zero: NaN there would reach that request. Shared blocks are finite, and stay.
    """
    for name in request_ids:
        ended = runner.requests.get(name)
        if ended is None:
            continue
        blocks = torch.tensor(sorted({block for group in ended.block_ids for block in group}))
        for cache in runner.kv_caches:
            if isinstance(cache, torch.Tensor) and cache.dtype.is_floating_point:
                parts = cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1))
                parts[blocks] = parts[blocks].nan_to_num(0.0, 0.0, 0.0)


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
        drafts=hooks.drafts(request_ids),
    )
