"""Size of a model: widths, number of layers, and weights active per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.errors import SpecError
from midstream.sites import Tap
from midstream.tools.capacity.weights import Weights, count_weights
from midstream.tools.capacity.widths import InnerWidths, inner_widths
from midstream.validation import hint, is_int, kind, listed, show

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
# Fields of the models' own config.json.
NAMED: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-405b": {
        **_LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}
# Alternative field names in configurations of other model families.
_ALSO = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model.

    Attributes:
        name: name or path, as requested.
        source: where the sizes are from.
        hidden_size: width of the residual stream.
        num_layers: number of decoder layers.
        dtype: dtype of the vectors: bfloat16, float16 or float32.
        weights: numbers of weights; None for an unknown model family.
        inner: widths of the sites inside attention and the MLP.
    """

    name: str
    source: str
    hidden_size: int
    num_layers: int
    dtype: str
    weights: Weights | None
    inner: InnerWidths = field(default_factory=InnerWidths)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector of the residual stream."""
        return self.hidden_size * self.itemsize

    def width(self, tap: Tap) -> int:
        """Return the number of components of a tap's vectors."""
        return self.inner.widths.get(tap, self.hidden_size)

    def parts(self, tap: Tap, tp: int) -> int:
        """Return the number of parts in which `tp` ranks have a tap's vectors; 1: each has all."""
        return min(tp, self.inner.parts.get(tap, 1))


def read_model(model: str, dtype: str = "auto") -> ModelSize:
    """Read the size of a model by the name of a built-in shape, by folder or by config.json.

    Nothing is downloaded.

    Args:
        model: one of `NAMED`, a folder with a config.json, or such a file.
        dtype: dtype of the engine. "auto": the configuration's, with float32 replaced by
            bfloat16, as vLLM does on a GPU.

    Raises:
        SpecError: the model does not exist or its configuration lacks a field. The path is
            `model`, with the field of the configuration, or `dtype`.
    """
    if model in NAMED:
        return read_config(NAMED[model], model, "built in: the sizes of its config.json", dtype)
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise SpecError(
            "model",
            f"expected one of {listed(NAMED)}, a folder with a config.json, or such a file; got "
            f"{show(model)}{hint(model, NAMED)}",
        )
    try:
        # Configurations have numbers that are none, such as Infinity.
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise SpecError("model", f"{path}: expected JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError("model", f"{path}: expected a JSON object, got {kind(config)}")
    return read_config(config, model, str(path), dtype)


def read_config(config: Mapping[str, Any], name: str, source: str, dtype: str) -> ModelSize:
    """Return a model's size from the fields of its config.json.

    Args:
        config: fields of config.json.
        name: name of the model.
        source: where the fields are from.
        dtype: see `read_model`.

    Raises:
        SpecError: see `read_model`.
    """
    # The language model's part of a multimodal configuration.
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    hidden_size, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    return ModelSize(
        name,
        source,
        hidden_size,
        layers,
        _dtype(text, dtype),
        count_weights(text),
        inner_widths(text, hidden_size, layers),
    )


def _number(config: Mapping[str, Any], name: str) -> int:
    names = (name, *_ALSO[name])
    found = next((config[one] for one in names if config.get(one) is not None), None)
    if found is None:
        raise SpecError(f"model.{name}", f"the configuration has none of {listed(names)}")
    if not is_int(found) or not 1 <= int(found) < 1 << 20:
        raise SpecError(
            f"model.{name}", f"expected a number from 1 to {(1 << 20) - 1}, got {found!r}"
        )
    return int(found)


def _dtype(config: Mapping[str, Any], requested: str) -> str:
    if requested in DTYPES:
        return requested
    if requested != "auto":
        raise SpecError("dtype", f"expected auto, {listed(DTYPES)}; got {show(requested)}")
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = found.removeprefix("torch.")
    if found not in DTYPES:
        raise SpecError(
            "dtype",
            f"the configuration has the unsupported dtype {show(found)}; set one of "
            f"{listed(DTYPES)}",
        )
    return "bfloat16" if found == "float32" else found
