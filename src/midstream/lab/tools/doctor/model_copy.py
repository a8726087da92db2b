"""Small random copy of a model, saved in transformers' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from midstream.lab.tools.doctor.small_config import Size, shrink
from midstream.lab.tools.doctor.small_towers import small_towers

# Large enough that attention, MLP and every layer change the output; biases differ from 0 and norm
# weights from 1.
WEIGHTS, OTHERS = 0.15, 0.1


def small_config(config: Any, size: Size) -> Any:
    """Return a small configuration of the language model's own class.

    Args:
        config: transformers configuration; of a multimodal one, the language model's part is used.
    """
    text = config.get_text_config(decoder=True)
    fields = shrink(text.to_dict(), size)
    return type(text).from_dict(fields)


def is_multimodal(config: Any) -> bool:
    """Return whether a configuration has a language model's part, or names a multimodal class."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    named = set(config.architectures or ()) & _MULTIMODAL_MODELS.keys()
    return bool(named) or config.get_text_config(decoder=True) is not config


def small_whole(config: Any, size: Size) -> Any:
    """Return a multimodal configuration with a small language model and small towers."""
    text = config.get_text_config(decoder=True)
    fields = small_towers(config, text, small_config(config, size), size)
    whole = type(config).from_dict(fields)
    whole.architectures = config.architectures
    return whole


def save_copy(config: Any, folder: Path, seed: int, architecture: str | None = None) -> None:
    """Save a model of this configuration with random weights.

    Args:
        folder: created if missing.
        architecture: architecture name for vLLM to load; None: the name of transformers' class.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError("transformers has no causal language model with this configuration")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    _draw(model)
    model.save_pretrained(folder)
    if architecture is not None:
        path = folder / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["architectures"] = [architecture]
        path.write_text(json.dumps(fields, indent=2), encoding="utf-8")


def save_config(config: Any, folder: Path) -> None:
    """Save a configuration alone, in place of a model that may be there."""
    for file in folder.iterdir():
        file.unlink()
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")


def drawn_weights(seed: int, gain: float | None = None) -> str:
    """Return vLLM's load format that draws weights as `save_copy` does, or by a matrix's `gain`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class DrawnWeights(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            torch.manual_seed(seed)
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and parameter.is_floating_point():
                    parameter.data.fill_(float(name.endswith("weight")))
            _draw(model, gain)

    register_model_loader(name := f"midstream_drawn_{seed}_{gain or 0}")(DrawnWeights)
    return name


def _draw(model: torch.nn.Module, gain: float | None = None) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:  # MXFP4 of some 3,000 columns, and its exponents
            parameter.data.random_(*((119, 121) if name.endswith("scale") else (0, 256)))
        if not parameter.is_floating_point():
            continue
        if "correction_bias" in name:
            # vLLM's CPU build ignores this bias in some routers, so it keeps its initial value 0.
            parameter.data.zero_()
        elif parameter.dim() > 1:
            std = WEIGHTS if gain is None else gain / parameter.shape[-1] ** 0.5
            torch.nn.init.normal_(parameter, std=std)
        else:
            parameter.data += OTHERS * torch.randn_like(parameter)


def read_config(model: str) -> Any:
    """Return a model's configuration, from vLLM where transformers lacks the model type, and a bare
    one where both do. Code that comes with the weights is not run.

    Raises:
        OSError, ValueError, KeyError: it cannot be read.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (ValueError, KeyError):
        fields, _ = PretrainedConfig.get_config_dict(model)
        if not {"model_type", "architectures"} <= fields.keys():
            raise
        return unknown_config(fields)


def unknown_config(fields: dict[str, Any]) -> Any:
    """Return the configuration of a model type that transformers lacks, which it knows from now on
    by vLLM's class, or by a bare one.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    name = fields["model_type"]

    def parts(config: Any, **values: Any) -> None:
        PretrainedConfig.__init__(config, **{key: _part(key, values[key]) for key in values})

    if name not in CONFIG_MAPPING:
        bare = type("BareConfig", (PretrainedConfig,), {"model_type": name, "__init__": parts})
        # Its values are names until they are asked for.
        known = name in _CONFIG_REGISTRY
        AutoConfig.register(name, _CONFIG_REGISTRY[name] if known else bare)
    return CONFIG_MAPPING[name].from_dict(fields)


class _Fields(dict[str, Any]):
    """Fields that can be read as attributes too; in a configuration, JSON like any dict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _part(field: str, value: Any) -> Any:
    """Return a part of a bare configuration as a configuration of its type, or a bare one too; of
    a list of parts, such as a block's for each layer, each with its own as attributes.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if field.endswith("_configs") and isinstance(value, list):
        return [_attributes(part) for part in value]
    is_part = field.endswith("_config") or field in ("encoder", "decoder")
    if not (is_part and isinstance(value, dict)) or "quant" in field:
        return value
    if value.get("model_type") not in CONFIG_MAPPING:
        return PretrainedConfig(**value)
    return CONFIG_MAPPING[value["model_type"]](**value)


def _attributes(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return _Fields({name: _attributes(item) for name, item in value.items()})
