"""Loads a transformers model for gradients: weights frozen, attention in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.errors import MissingExtraError, SpecError, UnsupportedError
from midstream.lab.attribution.model_files import QUANTISED, ModelFiles
from midstream.validation import show

if TYPE_CHECKING:
    from midstream.lab.attribution.hooked.model import HookedModel

DTYPES = ("float32", "bfloat16", "float16")
# What transformers, and the search for sites, raise for models that they cannot deal with.
_FAILURES = (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError, TypeError)
# The sites are found with this many tokens.
_PROBE = 12


def load_model(files: ModelFiles, *, dtype: Any, device: Any) -> HookedModel:
    """Load a model and find its sites; `dtype` is one of `DTYPES` or torch's."""
    for package in ("torch", "transformers"):
        MissingExtraError.require(package, "midstream.lab.attribution")
    from transformers import AutoConfig, AutoModelForCausalLM

    from midstream.lab.attribution.gradient_pass import gradients_enabled
    from midstream.lab.attribution.hooked.model import HookedModel

    number, place = _read_dtype(dtype), _read_device(device)
    try:
        config = AutoConfig.from_pretrained(files.model, **files.arguments)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(files, error) from error
    check_plain(files.model, config)
    # Weights that were loaded in inference mode could not be used in a backward pass.
    with gradients_enabled():
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                files.model, dtype=number, attn_implementation="eager", **files.arguments
            )
            hooked = HookedModel(loaded.requires_grad_(False).to(place))
            step = max(1, hooked.vocabulary // _PROBE)
            hooked.find_sites([token * step % hooked.vocabulary for token in range(_PROBE)])
        except _FAILURES as error:
            raise _unloadable(files, error) from error
    return hooked


def check_plain(model: str, config: Any) -> None:
    """Check that a model's weights are not quantised."""
    text = config.get_text_config(decoder=True)
    quantizations = [
        getattr(model_config, "quantization_config", None) for model_config in (config, text)
    ]
    quantization = next(filter(None, quantizations), None)
    if quantization is not None:
        method = (
            quantization.get("quant_method")
            if isinstance(quantization, dict)
            else quantization.quant_method
        )
        raise UnsupportedError(QUANTISED.format(model, getattr(method, "value", method)))


def _unloadable(files: ModelFiles, error: Exception) -> UnsupportedError:
    text = " ".join(str(error).split())[:500]
    return UnsupportedError(
        f"transformers cannot give gradients of {files.model}: {type(error).__name__}: {text}"
    )


def _read_dtype(value: Any) -> Any:
    import torch

    known = {name: getattr(torch, name) for name in DTYPES}
    if value in known.values():
        return value
    if not isinstance(value, str) or value not in known:
        shown = show(value) if isinstance(value, str) else repr(value)
        raise SpecError("dtype", f"expected one of {', '.join(DTYPES)}, got {shown}")
    return known[value]


def _read_device(value: Any) -> Any:
    import torch

    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError("device", f"{value!r} cannot be used: {reason}") from error
    return device
