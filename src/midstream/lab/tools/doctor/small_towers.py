"""Small towers of a multimodal configuration, derived by rules on field names.

What is beside the language model: encoders of images and sounds, and what projects them to the
width of the stream. Fields without a rule keep their values.
"""

from __future__ import annotations

import re
from typing import Any

from midstream.lab.tools.doctor.small_config import VOCABULARY, Size

LAYERS, HEADS, WIDTH, INNER = 2, 2, 64, 96
_LAYERS = (
    "num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers", "n_layers", "n_layer",
    "decoder_layers", "num_hidden_blocks", "depths", "vt_num_hidden_layers", "num_conformer_blocks",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "num_heads", "n_head", "n_heads", "heads", "encoder_attention_heads",
    "attention_heads", "num_key_value_heads", "vt_num_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_WIDTHS = ("hidden_size", "embed_dim", "d_model", "width", "n_embd", "vt_hidden_size")
_INNER = (
    "intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim", "d_inner", "vt_intermediate_size",
    "decoder_ffn_dim", "feedforward_dim",
)  # fmt: skip
# Widths of the stream, in the configuration of a tower.
_STREAM = (
    "out_hidden_size", "vision_output_dim", "output_dim", "projector_output_dim",
    "projector_input_dim", "text_hidden_size", "llm_hidden_size", "projection_dim",
    "text_config_hidden_size", "mm_hidden_size", "out_dim", "audio_output_dim",
)  # fmt: skip
_DROPPED = ("id2label", "label2id", "quantization_config", "auto_map")
_INDICES = re.compile(r"(indexes|indices|_layers?|_idx|_ids)$")
_TOKEN = re.compile(r"(token_id|token_index|_token)$")


def small_towers(config: Any, text: Any, small_text: Any, size: Size) -> dict[str, Any]:
    """Return the fields of a configuration with a small language model and small towers.

    Args:
        config: the whole configuration, or a part of it that the language model is in or not.
        text: its language model's part; the whole where the model's fields are beside its towers'.
        small_text: what takes the place of that.
    """
    is_flat = config is text
    whole = small_text.to_dict() if is_flat else config.to_dict()
    fields: dict[str, Any] = {}
    for name, value in whole.items():
        part = getattr(config, name, None)
        if name in _DROPPED:
            continue
        if hasattr(part, "to_dict"):
            is_text = part is text
            fields[name] = (
                small_text.to_dict() if is_text else small_towers(part, text, small_text, size)
            )
        elif is_flat and not isinstance(value, dict):
            fields[name] = value
        else:
            fields[name] = _field(name, value, whole, size)
    return fields


def _field(name: str, value: Any, whole: dict[str, Any], size: Size) -> Any:
    """Return the reduced value of one field of a tower, by its name."""
    if isinstance(value, dict):
        return {key: _field(str(key), item, value, size) for key, item in value.items()}
    if _TOKEN.search(name) and isinstance(value, int):
        return value if value < VOCABULARY else _token(name, whole)
    if isinstance(value, list):
        count = next((whole[key] for key in _LAYERS if isinstance(whole.get(key), int)), 0)
        return _list(name, value, count)
    if type(value) is not int or value <= 0:
        return value
    rules: tuple[tuple[tuple[str, ...], int], ...] = (
        (_LAYERS, min(value, LAYERS)),
        (_HEADS, min(value, HEADS)),
        (_WIDTHS, WIDTH),
        (_INNER, INNER),
        (_STREAM, size.hidden),
        (("head_dim",), WIDTH // HEADS),
        (("vision_feature_layer", "select_layer"), min(value, LAYERS - 1)),
    )
    for names, small in rules:
        if name in names:
            return small
    return value


def _token(name: str, whole: dict[str, Any]) -> int:
    """Return a token id: 3 of an image, or of a sound where there are no images."""
    if "video" in name:
        return 1
    images = any("image" in key and _TOKEN.search(key) for key in whole)
    return 2 if "audio" in name and images else 3


def _list(name: str, value: list[Any], count: int) -> list[Any]:
    """Return what a small tower has of a list of layers' indices, or with an entry for each of its
    `count` layers; another list as it is.
    """
    if count > LAYERS and len(value) == count:
        return value[:LAYERS]
    if not (_INDICES.search(name) and value and all(type(item) is int for item in value)):
        return value
    if max(value) >= count:
        return value
    return sorted({max(-LAYERS, min(index, LAYERS - 1)) for index in value})
