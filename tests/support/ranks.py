"""Engines over several ranks, on two cores or GPUs, and their tolerances."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.adversary_judge import Measure
from support.engines import engine, generated
from support.forkserver import in_place_of_spawning
from support.oracle import relative_error

GPUS = torch.cuda.device_count()
# On a GPU sums depend on which requests share a step, and attention rounds to TF32.
MEASURE = (
    Measure(rows=4e-2, tie=0.2, splits=True, error=relative_error) if GPUS else Measure(splits=True)
)
# Further from transformers, which has TF32 nowhere: by up to 4.1e-2 where it was seen.
HOOKED = replace(MEASURE, rows=8e-2, tie=0.4) if GPUS else MEASURE
PIPELINE = {"pipeline_parallel_size": 2} | (
    {} if GPUS else {"enforce_eager": False, "async_scheduling": False}
)


@contextmanager
def ranks(model: Path, **args: Any) -> Iterator[Any]:
    """Start an engine whose core and workers are separate processes."""
    from vllm import envs

    # The first engine of a process has them remembered.
    getattr(envs, "disable_envs_cache", lambda: None)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # A core for each rank; there are two.
        count = max(2, args.get("tensor_parallel_size", 1))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("0101"[:count]))
        with in_place_of_spawning(), engine(model, **{"enforce_eager": not GPUS, **args}) as llm:
            try:
                yield llm
            finally:
                # Other engines of this process keep running; the last one would shut it down.
                llm.llm_engine.engine_core.shutdown()


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """The tokens and rows of one engine's outputs are those of another's."""
    for nth, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.receipt.status == other.receipt.status == "ok"
        assert generated(one) == generated(other), nth
        assert list(one.activations) == list(other.activations)
        for tap in one.activations:
            mine, theirs = one.activations[tap].float(), other.activations[tap].float()
            assert mine.shape == theirs.shape
            error = MEASURE.error(mine.flatten(1), theirs.flatten(1))
            assert error < MEASURE.rows, f"{nth}, {tap}: off by {error}"


def usage(llm: Any) -> list[dict[str, Any]]:
    """Return the usage of each worker, in their order."""
    from midstream.runtime.protocol.rpc import RPC, ReadUsage, arguments_of

    found: list[dict[str, Any]] = llm.llm_engine.collective_rpc(RPC, args=arguments_of(ReadUsage()))
    return found
