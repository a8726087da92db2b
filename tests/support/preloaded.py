"""Imports of a process before it forks others; importing this module runs them.

A fresh interpreter takes eight seconds of a core for it. No thread may exist when it is done: a
process with threads must not fork.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import setproctitle

_MODULES = (
    "torch._inductor.lowering", "vllm", "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker",
    "midstream.lab.api.async_llm", "midstream.lab.api.llm",
)  # fmt: skip


def fork_in_place_of_spawning() -> None:
    """Have vLLM fork engine cores and workers, as it does on a GPU. On a CPU it spawns them, and a
    spawned process imports everything anew.
    """
    original = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return original("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context


def log_anew() -> None:
    """Have vLLM's log follow the environment of now: it read the level when it was imported."""
    from vllm import logger

    logger._configure_vllm_root_logger()


def check_threads() -> None:
    """Check that this process has one thread."""
    lines = Path("/proc/self/status").read_text().splitlines()
    count = next(line for line in lines if line.startswith("Threads:")).split()[1]
    assert count == "1", f"{count} threads: a process with threads must not fork"


# scikit-learn imports pandas and pyarrow, whose allocator starts a thread. transformers uses it for
# one metric of assisted generation.
transformers_utils: Any = importlib.import_module("transformers.utils")
transformers_utils.is_sklearn_available = lambda: False
for _name in _MODULES:
    importlib.import_module(_name)
registry: Any = importlib.import_module("vllm.model_executor.models.registry")
# vLLM gives its processes titles, for which room is looked up while the environment is as it was.
setproctitle.setproctitle(setproctitle.getproctitle())
registry._run_in_subprocess = lambda function: function()  # which would import vLLM anew
# Inductor would compile it anew in each engine core, for seconds.
sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
sampler.batched_count_greater_than = sampler.batched_count_greater_than._torchdynamo_orig_callable
gc.collect()
gc.freeze()
# It stays frozen in the children: vLLM collects garbage three times as an engine ends.
gc.unfreeze = lambda: None
if os.environ.get("MIDSTREAM_TEST_FORKS"):
    fork_in_place_of_spawning()
    check_threads()
