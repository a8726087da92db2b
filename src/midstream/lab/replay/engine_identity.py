"""What the bits of an engine's results depend on, and the arguments that start an engine alike."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstream.config.config import KEY, from_additional_config
from midstream.errors import SpecError
from midstream.validation import at, read_fields, show

# Arguments of `LLM` by the field of the identity that they set.
_ARGUMENTS = (
    *("revision", "dtype", "quantization", "kv_cache_dtype", "enforce_eager"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)
# Settings of midstream that decide what runs. Those that name files or Python code are left out: a
# record may be somebody else's.
_SETTINGS = (
    *("sites", "layers", "tapped_model", "codec", "return", "probes", "doses", "maps"),
    *("gate_states", "reductions", "unscored_tokens", "on_nonfinite", "max_dose"),
)


def identify(llm: Any) -> dict[str, Any]:
    """Return what the bits of an engine's results depend on, as JSON values."""
    import torch
    import vllm.envs as envs

    from midstream.runtime.frontend.results.sink_setup import origin_of

    config = llm.llm_engine.vllm_config
    origin = origin_of(config, llm.info)
    settings = from_additional_config(config.additional_config)
    assert settings is not None, "the engine has midstream"
    return {
        "midstream": origin.midstream,
        "vllm": origin.vllm,
        "torch": torch.__version__,
        "model": origin.model,
        "revision": origin.revision,
        "dtype": origin.dtype,
        "quantization": config.model_config.quantization,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "device": _device(),
        "tensor_parallel_size": origin.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "enforce_eager": bool(config.model_config.enforce_eager),
        "batch_invariant": bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        "tapped_model": settings.tapped_model,
    }


def settings_of(llm: Any) -> dict[str, Any]:
    """Return the further arguments of `LLM` that start an engine with the same taps."""
    config = llm.llm_engine.vllm_config
    section = from_additional_config(config.additional_config)
    assert section is not None, "the engine has midstream"
    known = section.to_dict()
    return {
        KEY: {name: known[name] for name in _SETTINGS if name in known},
        "max_model_len": config.model_config.max_model_len,
    }


def check_settings(value: object) -> None:
    """Check that settings of a record name neither files nor code.

    Raises:
        SpecError: there is one that `settings_of` does not return.
    """
    fields = read_fields(value, required=(), optional=(KEY, "max_model_len"))
    with at(KEY):
        read_fields(fields.get(KEY, {}), required=(), optional=_SETTINGS)


def arguments_of(identity: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `LLM` for an engine of an identity; its model is not among them."""
    known = {name: identity[name] for name in _ARGUMENTS if identity.get(name)}
    return {**known, **settings}


def check_identity(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that an engine gives the bits of a record.

    Raises:
        SpecError: it differs; the path is the first field, the message has all.
    """
    differ = [name for name in {**recorded, **here} if recorded.get(name) != here.get(name)]
    if not differ:
        return
    first, *more = differ
    also = f"; {', '.join(more)} differ too" if more else ""
    raise SpecError(
        f"engine.{first}",
        f"the requests were recorded with {show(recorded.get(first))}, this engine has "
        f"{show(here.get(first))}{also}; start the engine as it was recorded, or compare all the "
        "same with anyway=True (--anyway)",
    )


def _device() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _processor()
    return str(current_platform.get_device_name())


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(errors="replace").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
