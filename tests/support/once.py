"""What vLLM does at the start of each engine on a CPU, done once for a process and its forks."""

import functools
import logging
import warnings
from typing import Any


def for_all_engines() -> None:
    """Have vLLM look at a model's class here: it starts a process for that, which imports vLLM
    anew. Have its small functions run uncompiled: Inductor would compile them for each engine and
    each rank. Have it search all modules for Triton's kernels and all packages for logits
    processors now, and never again. Have it set the levels of its loggers without a search of all
    loggers for each.
    """
    from vllm import logger
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.sample import logits_processor, sampler
    from vllm.v1.worker import gpu_model_runner

    for module, name in (
        (gpu_model_runner, "update_num_computed_tokens_for_batch_change"),
        (sampler, "batched_count_greater_than"),
        (vocab_parallel_embedding, "get_masked_input_and_mask"),
    ):
        function = getattr(module, name, None)
        setattr(module, name, getattr(function, "_torchdynamo_orig_callable", function))
    registry._run_in_subprocess = lambda function: function()
    logger._configure_vllm_root_logger = functools.partial(
        _forgetting_once, logger._configure_vllm_root_logger
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of old names in torch
        current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    processors = functools.cache(logits_processor._load_logitsprocs_plugins)
    processors()
    logits_processor._load_logitsprocs_plugins = processors


def _forgetting_once(configure: Any, *args: Any, **kwargs: Any) -> None:
    """Set vLLM's loggers; all loggers forget what they know of levels at the end, not with each."""
    forget = logging.Manager._clear_cache  # type: ignore[attr-defined]
    logging.Manager._clear_cache = lambda _self: None  # type: ignore[attr-defined]
    try:
        configure(*args, **kwargs)
    finally:
        logging.Manager._clear_cache = forget  # type: ignore[attr-defined]
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]
