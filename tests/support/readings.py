"""What a made-up engine of 40 tokens has for read-outs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from midstream.plan import ModelShape, Plan, Prompt, ResolvedPlan
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.frontend.request.readouts import EngineReadings, finished
from midstream.runtime.protocol.worker_info import WorkerInfo
from support.stored import worker_info


def readings(workers: Sequence[WorkerInfo], tokenizer: Any = None) -> EngineReadings:
    """Return what the engine of some workers has; without a tokenizer it has none."""

    def get_tokenizer() -> Any:
        if tokenizer is None:
            raise ValueError("skip_tokenizer_init")
        return tokenizer

    model = SimpleNamespace(get_vocab_size=lambda: 40)
    engine = SimpleNamespace(
        get_tokenizer=get_tokenizer, vllm_config=SimpleNamespace(model_config=model)
    )
    return EngineReadings(engine, workers, {})


def finished_plan(plan: Plan, shape: ModelShape) -> ResolvedPlan:
    """Return a plan for a prompt of 6 tokens and 3 generated ones, with what the engine has."""
    known = readings([worker_info(taps=tuple(shape.taps))])
    return finished(resolve(plan, shape, Prompt(6), 3), plan, known)[0]
