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
    # vLLM imports these where it wants them, which is once in each server, core or worker.
    "anyio._backends._asyncio",
    "model_hosting_container_standards.sagemaker",
    "ray.dag",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "vllm.compilation.backends",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.factories",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.instrumentator.offline_docs",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.sagemaker.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.pool.flash_maxsim",
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
