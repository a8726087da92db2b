"""Engine settings that are rejected at start-up: taps would be wrong, or results lost."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from midstream.config.config import Config, from_additional_config
from midstream.errors import ConfigError, UnsupportedError

_GUARD = (
    "the engine's process imports this script, which starts an engine again; put the script's body "
    'under `if __name__ == "__main__":`'
)


def check_model(model: str) -> None:
    """Raise ConfigError for the path of a folder that does not exist, before a hub is asked."""
    if isinstance(model, str) and model.startswith(("/", ".", "~")) and not os.path.exists(model):
        problem = f"there is no folder {model!r} in {os.getcwd()}"
        if model.startswith("/"):
            problem = f"there is no folder {model!r}"
        elif os.path.exists(os.path.expanduser(model)):
            problem = f"write {os.path.expanduser(model)!r}: `~` is of the shell"
        raise ConfigError(f"model: {problem}; expected a folder, or a name such as org/model")


@contextmanager
def named_model(model: object) -> Iterator[None]:
    """Raise a ConfigError where the Hugging Face Hub does not have a model, or cannot be asked."""
    try:
        yield
    except (OSError, ValueError) as error:
        is_of_hub = type(error).__module__.startswith("huggingface_hub")
        # transformers raises OSErrors of its own, which have no number.
        is_of_hub |= isinstance(error, OSError) and error.errno is None
        if not is_of_hub or os.path.exists(str(model)):
            raise
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: there is no folder {model!r} here, and the Hugging Face Hub did not give it; "
            f"check the name, or give the path of a folder ({type(error).__name__}: {said})"
        ) from None


class Rule(NamedTuple):
    """An unsupported setting, as the user writes it; why it is unsupported, and what to do."""

    setting: str
    found: Callable[[Any], bool | str]  # a text says what it is
    reason: str


# Drafting methods under which the model's own forward pass is as without drafting: rows at given
# positions. Drafters have their own layers, which are not tapped.
SPECULATION = (
    "ngram",
    "ngram_gpu",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "extract_hidden_states",
)

# Connectors of `kv_transfer_config` that hand out hidden states and bring no KV: each request's KV
# is computed here, or comes from the prefix cache, whose keys have the edits.
HIDDEN_STATE_READERS = (
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector:"
    "ExampleHiddenStatesConnector",
    "hs_connectors.mooncake_hidden_states_connector:MooncakeHiddenStatesConnector",
)
# What a connector brings KV by.
_LOADING = ("get_num_new_matched_tokens", "start_load_kv", "wait_for_layer_load")

RULES: tuple[Rule, ...] = (
    Rule(
        "enable_dbo",
        lambda c: bool(getattr(c.parallel_config, "use_ubatching", False)),
        "dual-batch overlap calls the model on slices of the batch, so rows are not where a tap "
        "expects them",
    ),
    Rule(
        "prefill_context_parallel_size > 1",
        lambda c: getattr(c.parallel_config, "prefill_context_parallel_size", 1) > 1,
        "each rank sees only some of a request's rows",
    ),
    Rule(
        "kv_sharing_fast_prefill",
        lambda c: bool(getattr(c.cache_config, "kv_sharing_fast_prefill", False)),
        "later layers run on the last rows only",
    ),
    Rule(
        "sequence-parallel mixture of experts",
        lambda c: bool(getattr(c.parallel_config, "use_sequence_parallel_moe", False)),
        "the residual stream is split over the ranks by tokens",
    ),
    Rule(
        "compilation_config.pass_config.enable_sp",
        lambda c: bool(getattr(c.compilation_config.pass_config, "enable_sp", False)),
        "sequence parallelism splits the residual stream over the ranks by tokens",
    ),
    Rule(
        'additional_config["decode_backend"] = "latency_specialized"',
        lambda c: (
            isinstance(c.additional_config, dict)
            and c.additional_config.get("decode_backend") == "latency_specialized"
        ),
        "that decode path bypasses the model's layers",
    ),
    Rule(
        f'speculative_config["method"] other than {", ".join(SPECULATION)}',
        lambda c: (
            c.speculative_config is not None and c.speculative_config.method not in SPECULATION
        ),
        "the effect of that method on the model's own forward pass is not verified",
    ),
    Rule(
        'speculative_config["enable_adaptive_verification"]',
        lambda c: bool(getattr(c.speculative_config, "enable_adaptive_verification", False)),
        "the device then decides which rows belong to which request",
    ),
    Rule(
        "kv_transfer_config of a connector that brings KV",
        lambda c: _bringing_kv(getattr(c, "kv_transfer_config", None)),
        "KV from another engine or store may have been computed with other edits; of connectors, "
        f"{', '.join(path.partition(':')[2] for path in HIDDEN_STATE_READERS)} and classes of "
        "these, which only read hidden states, are supported, also in a MultiConnector",
    ),
    Rule(
        'midstream.tapped_model = "lazy" with data parallelism',
        lambda c: (
            getattr(c.parallel_config, "data_parallel_size", 1) > 1
            and (from_additional_config(c.additional_config) or Config()).tapped_model == "lazy"
        ),
        "replicas must run the same dummy runs, also those that compile the tapped model; use "
        '"startup"',
    ),
    Rule(
        'midstream.hooks = "local" with speculative_config',
        lambda c: _calls_functions(c) and c.speculative_config is not None,
        "the positions of rows are not known on the host when their function is called",
    ),
    Rule(
        'midstream.hooks = "local" without enforce_eager',
        lambda c: _calls_functions(c) and not c.model_config.enforce_eager,
        "Python functions do not run in compiled graphs",
    ),
    Rule(
        'midstream.tapped_model = "exact" without VLLM_BATCH_INVARIANT=1 on a GPU',
        lambda c: _is_exact(c) and not _is_batch_invariant(c),
        "a request's sums depend on what else is in its steps: set the variable, or use "
        '"always" without that promise',
    ),
    Rule(
        "enable_elastic_ep",
        lambda c: bool(getattr(c.parallel_config, "enable_elastic_ep", False)),
        "workers and replicas start and stop while requests run",
    ),
    Rule(
        'distributed_executor_backend other than "uni", "mp", and "ray" as vLLM has it by default '
        "(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1)",
        lambda c: _is_other_executor(c.parallel_config.distributed_executor_backend),
        "results are fetched by RPCs that all workers must answer between two steps; other "
        "executors answer during a step, or return only one rank's answer",
    ),
    Rule(
        "an encoder-decoder model",
        lambda c: bool(getattr(c.model_config, "is_encoder_decoder", False)),
        "an encoder's rows are not a request's tokens",
    ),
    Rule(
        "cpu_offload_gb with UVA switched off",
        lambda c: _offloads_without_uva(c),
        "weights are swapped around each layer's call, which would run its tap twice",
    ),
)


def check_settings(vllm_config: Any) -> None:
    """Check an engine's settings against all rules."""
    refused = []
    for rule in RULES:
        if found := rule.found(vllm_config):
            got = f"; got {found}" if isinstance(found, str) else ""
            refused.append(f"{rule.setting}: {rule.reason}{got}")
    if refused:
        raise UnsupportedError(
            "midstream is enabled, but does not support these engine settings; change them, or "
            "remove `midstream` from additional_config.\n  " + "\n  ".join(refused)
        )


def check_layers(vllm_config: Any, config: Config) -> None:
    """Check that the model has the layers of the settings, before its weights are read."""
    model = vllm_config.model_config
    count = getattr(model.hf_text_config, "num_hidden_layers", None)
    if count:
        config.resolve_layers(max(count, model.get_total_num_hidden_layers()))


def check_offline(data_parallel_size: int) -> None:
    """Check that an engine which its caller steps, such as that of `LLM`, has one replica."""
    if data_parallel_size > 1:
        raise UnsupportedError(
            f"data_parallel_size={data_parallel_size}: unsupported by an offline engine; use "
            "midstream.AsyncLLM, a server, or several processes, each with its own LLM"
        )


def check_script() -> None:
    """Check that the engine's processes can import its script; one that starts an engine ends."""
    import torch
    import vllm.envs as envs

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    spawns = envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
    if spawns and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"midstream: {_GUARD}")
    spawns |= torch.cuda.is_initialized() or torch.version.cuda is torch.version.hip is None
    main = vars(sys.modules["__main__"])
    if spawns and main.get("__spec__") is None and main.get("__file__") == "<stdin>":
        raise UnsupportedError(
            "the engine's process cannot import a script that is read from standard input; save "
            'it as a file, with its body under `if __name__ == "__main__":`, or set '
            "VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )


def _calls_functions(vllm_config: Any) -> bool:
    config = from_additional_config(vllm_config.additional_config)
    return config is not None and config.hooks == "local"


def _is_exact(vllm_config: Any) -> bool:
    config = from_additional_config(vllm_config.additional_config)
    return config is not None and config.tapped_model == "exact"


def _is_batch_invariant(vllm_config: Any) -> bool:
    import vllm.envs as envs

    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cuda")
    return device != "cpu" and bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def _bringing_kv(transfer: Any) -> str:
    """Return the connector of a `KVTransferConfig` that may bring KV, and why; empty: none does."""
    connector = getattr(transfer, "kv_connector", None)
    if connector is None:
        return ""
    if connector == "MultiConnector" and not transfer.kv_connector_module_path:
        inner = transfer.kv_connector_extra_config.get("connectors", [])
        texts = [_bringing_kv(type(transfer)(**dict(settings))) for settings in inner]
        return next((f"{text}, in a MultiConnector" for text in texts if text), "")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        cls = KVConnectorFactory.get_connector_class(transfer)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{connector}, which cannot be imported ({type(error).__name__}: {error})"
    for base in cls.__mro__:
        if f"{base.__module__}:{base.__qualname__}" in HIDDEN_STATE_READERS:
            loading = [name for name in _LOADING if getattr(cls, name) is not getattr(base, name)]
            return f"{connector}, which has its own {' and '.join(loading)}" if loading else ""
    return str(connector)


def _is_other_executor(backend: object) -> bool:
    import vllm.envs as envs

    if backend == "ray":
        return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    return backend not in (None, "uni", "mp")


def _offloads_without_uva(vllm_config: Any) -> bool:
    import vllm.envs as envs

    offload = getattr(vllm_config, "offload_config", None)
    uva = getattr(offload, "uva", None)
    gigabytes = getattr(uva, "cpu_offload_gb", 0) or 0
    if not gigabytes:
        return False
    if getattr(envs, "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", False):
        return True
    from vllm.utils.platform_utils import is_uva_available

    return not is_uva_available()  # as where memory cannot be pinned, under WSL
