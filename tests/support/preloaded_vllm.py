"""Imports of vLLM in a process before it forks others; importing this module runs them.

A fresh interpreter takes eight seconds of a core for it. No thread may exist when it is done: a
process with threads must not fork.
"""

import importlib
from pathlib import Path
from typing import Any

_MODULES = (
    "torch._inductor.lowering",
    "vllm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
)


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
