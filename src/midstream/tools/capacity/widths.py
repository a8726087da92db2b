"""Widths of the sites inside attention and the MLP, from the fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from midstream.sites import INNER, Tap
from midstream.tools.capacity.weights import experts_of, has_experts
from midstream.validation import is_int

_QUERIES = ("q", "rot_q", "z")
_KEYS = ("k", "v", "rot_k")
_ROTATED = ("rot_q", "rot_k")
# Names of a number in the configurations of model families, the usual one first.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}
# Families whose MLP is four times as wide as the stream if the configuration does not say.
_FOUR_TIMES = ("gpt2", "gpt_bigcode", "falcon", "gptj", "codegen", "bloom")
_NO_GATE = (
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "codegen", "bloom", "opt", "phi", "falcon",
    "starcoder2", "nemotron",
)  # fmt: skip
_NO_ROPE = ("gpt2", "gpt_bigcode", "bloom", "opt", "mpt")


@dataclass(frozen=True, slots=True)
class InnerWidths:
    """The vectors of the sites inside attention and the MLP.

    Attributes:
        widths: number of components of each tap that the configuration determines.
        parts: most ranks that such a vector can be split over: heads and neurons; 1: none.
        reasons: why the model lacks each of the others, or why their width is unknown.
    """

    widths: Mapping[Tap, int] = field(default_factory=dict)
    parts: Mapping[Tap, int] = field(default_factory=dict)
    reasons: Mapping[Tap, str] = field(default_factory=dict)


def inner_widths(config: Mapping[str, Any], hidden_size: int, num_layers: int) -> InnerWidths:
    """Return the widths of all inner sites of a model.

    Args:
        config: fields of config.json.
        hidden_size: width of the residual stream.
        num_layers: number of decoder layers.
    """
    widths, parts, reasons = dict[Tap, int](), dict[Tap, int](), dict[Tap, str]()
    for layer in range(num_layers):
        for site in INNER:
            one = _vectors(config, site, layer, hidden_size)
            if isinstance(one, str):
                reasons[site, layer] = one
            else:
                widths[site, layer], parts[site, layer] = one
    return InnerWidths(widths, parts, reasons)


def _vectors(
    config: Mapping[str, Any], site: str, layer: int, hidden_size: int
) -> tuple[int, int] | str:
    """Return (width, most parts) of a tap's vectors, or why there is none."""
    if site in (*_QUERIES, *_KEYS):
        return _of_heads(config, site, hidden_size)
    routed = has_experts(config, layer)
    if site == "router":
        return (experts_of(config), 1) if routed else "this layer has no experts"
    if routed:
        return "its experts run in one kernel"
    family = config.get("model_type")
    if site == "mlp_pre_linear" and family in _NO_GATE:
        return "this MLP has no gate"
    width = _number(config, "intermediate_size", layer)
    if width is None and family in _FOUR_TIMES:
        width = 4 * hidden_size
    return _unknown("intermediate_size") if width is None else (width, width)


def _of_heads(config: Mapping[str, Any], site: str, hidden_size: int) -> tuple[int, int] | str:
    if config.get("kv_lora_rank") is not None:
        return "multi-head latent attention has no per-head keys and values"
    if site in _ROTATED and config.get("model_type") in _NO_ROPE:
        return f"this model has no rotary embedding; use {site.removeprefix('rot_')}"
    queries = _number(config, "num_attention_heads")
    if queries is None:
        return _unknown("num_attention_heads")
    heads = queries
    if site in _KEYS:
        heads = _number(config, "num_key_value_heads") or queries
        # Falcon's smaller models have no other sign of their one head of keys.
        if config.get("multi_query") and not config.get("new_decoder_architecture"):
            heads = 1
    return heads * (_number(config, "head_dim") or hidden_size // queries), heads


def _number(config: Mapping[str, Any], name: str, layer: int = 0) -> int | None:
    """Return a number of the configuration, which may be a list with one for each layer."""
    for one in _NAMES.get(name, (name,)):
        found = config.get(one)
        if isinstance(found, list) and layer < len(found):
            found = found[layer]
        if is_int(found) and int(found) > 0:
            return int(found)
    return None


def _unknown(name: str) -> str:
    return f"its width is unknown: the configuration has no {name}"
