"""What vLLM does at the start of each engine on a CPU, done once for a process and its forks."""

import functools
import warnings
from typing import Any


def for_all_engines() -> None:
    """Have vLLM look at a model's class here: it starts a process for that, which imports vLLM
    anew. Have it count ranks of tokens uncompiled: Inductor would compile that for each engine.
    Have it search all modules for Triton's kernels and all packages for logits processors now, and
    never again.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.sample import logits_processor, sampler

    ranks: Any = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(ranks, "_torchdynamo_orig_callable", ranks)
    registry._run_in_subprocess = lambda function: function()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of old names in torch
        current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    processors = functools.cache(logits_processor._load_logitsprocs_plugins)
    processors()
    logits_processor._load_logitsprocs_plugins = processors
