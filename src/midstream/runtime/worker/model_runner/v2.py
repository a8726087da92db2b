"""vLLM's V2 model runner (`vllm.v1.worker.gpu.model_runner`), the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from midstream.runtime.worker.model_runner.hooks import Hooks, report_results
from midstream.runtime.worker.step.step_batch import StepBatch


def attach(runner: Any, hooks: Hooks) -> None:
    """Wrap `execute_model`, and `preprocess_state`, which real batches alone call, with inputs
    prepared. The state's class is swapped, not wrapped: the runner writes attributes through it.
    """
    execute_model: Callable[..., Any] = runner.execute_model
    state = runner.model_state
    cls = type(state)

    def preprocess_state(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.preprocess_state(self, input_batch, *args, **kwargs)
        hooks.before_forward(_batch(input_batch, hooks))
        return out

    def execute_model_hooked(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dummy_run", False):
            hooks.on_schedule(scheduler_output)
        out = execute_model(scheduler_output, *args, **kwargs)
        hooks.after_forward()
        return out

    namespace = {"__module__": cls.__module__, "preprocess_state": preprocess_state}
    state.__class__ = type(f"Armed{cls.__name__}", (cls,), namespace)
    runner.execute_model = execute_model_hooked
    report_results(runner, hooks)


def block_size(runner: Any, group: int) -> int:
    """Return the tokens of a block of a KV cache group."""
    size: int = runner.block_tables.block_sizes[group]
    return size


def block_table(runner: Any, group: int) -> Tensor:
    """Return the batch's blocks, int32 [requests, blocks], and further rows without a meaning."""
    table: Tensor = runner.block_tables.input_block_tables[group]
    return table


def _batch(batch: Any, hooks: Hooks) -> StepBatch:
    num_requests = batch.num_reqs
    return StepBatch(
        request_ids=batch.req_ids,
        scheduled=batch.num_scheduled_tokens[:num_requests],
        computed=batch.num_computed_tokens_np[:num_requests],
        num_tokens=batch.num_tokens,
        token_ids=lambda: batch.input_ids[: batch.num_tokens],
        unknown=hooks.unknown_positions(batch.req_ids, lambda: batch.positions[: batch.num_tokens]),
        drafts=hooks.drafts(batch.req_ids),
    )
