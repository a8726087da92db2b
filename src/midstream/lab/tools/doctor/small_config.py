"""Small configuration of the same architecture, derived from a large one by rules on field names.

The rules depend on names of fields, not on models. Fields without a rule keep their values, so a
copy may be larger than necessary but never of another architecture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from midstream.lab.tools.doctor import layers_kept

VOCABULARY = 199
HEADS = 2
# CPU attention kernels support few head sizes; these are two of them.
HEAD_DIM, OTHER_HEAD_DIM = 32, 64
INTERMEDIATE = 96
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
POSITIONS = 512
# Longer than any test request: vLLM and transformers disagree by one token about the start of some
# sliding windows, which is unrelated to taps.
WINDOW = 64
# A multiple of vLLM's KV block size on the CPU.
CHUNK = 128

_WIDTHS = (
    "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "model_dim", "block_dim", "conv_dim",
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_INNER = (
    "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "intermediate_dim",
    "expert_hidden_dim", "intermediate_size_mlp",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
    "moe_top_k",
)  # fmt: skip
_GROUPS = ("n_group", "topk_group", "num_expert_group", "mamba_ngroups", "mamba_n_groups")
_POSITIONS = (
    "max_position_embeddings", "n_positions", "model_max_length", "max_sequence_length",
    "seq_length", "n_ctx", "max_seq_len",
)  # fmt: skip
_PERIODS = (
    "attn_layer_period", "expert_layer_period", "full_attention_interval",
    "sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval",
    "interleave_moe_layer_step", "moe_layer_interval", "decoder_sparse_step",
)  # fmt: skip
_OFFSETS = ("attn_layer_offset", "expert_layer_offset")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_DROPPED = (
    "quantization_config", "_name_or_path", "transformers_version", "auto_map",
    "output_attentions",
)  # fmt: skip
_MAMBA_HEADS = (
    ("mamba_num_heads", "mamba_head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)
_EXPANDS = ("mamba_expand", "expand")


@dataclass(frozen=True)
class Size:
    """Size of a small copy.

    Attributes:
        layers: minimum number of layers; one of each kind is kept.
        hidden: width of the residual stream, a multiple of 64.
    """

    layers: int = 3
    hidden: int = 64


def shrink(config: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return the fields of a small configuration.

    Args:
        config: `PretrainedConfig.to_dict()` of a language model; not modified.
    """
    fields = {name: value for name, value in config.items() if name not in _DROPPED}
    kept = layers_kept.choose(fields, size.layers)
    layers_kept.keep(fields, kept)
    for name in _PERIODS:
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], 2)
    for name in _OFFSETS:
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], 1)
    fields = _fields(fields, fields, size)
    _fit_attention(fields, config)
    _fit_mamba(fields, size)
    _fit_rope(fields, config)
    fields["dtype"] = "float32"
    return fields


def _fields(fields: dict[str, Any], whole: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return all fields after their rules, including those of nested dicts."""
    shrunk: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config":
            shrunk[name] = {
                key: {**_fields(layer_fields, whole, size), **_other_heads(layer_fields)}
                for key, layer_fields in value.items()
            }
        elif name in ("ffn_config", "attn_config") and isinstance(value, dict):
            given_there = {
                key: nested_value for key, nested_value in value.items() if key not in _DROPPED
            }
            shrunk[name] = _fields(given_there, whole, size)
        elif name.endswith("token_id"):
            shrunk[name] = _token(name, value)
        elif isinstance(value, list) and value and all(_is_count(number) for number in value):
            shrunk[name] = [_field(name, number, whole, size) for number in value]
        else:
            shrunk[name] = _field(name, value, whole, size) if _is_count(value) else value
    return shrunk


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _field(name: str, value: int, whole: dict[str, Any], size: Size) -> int:
    """Return the reduced value of one count, by the name of its field."""
    heads = HEADS * max(1, size.hidden // (HEADS * HEAD_DIM))
    if name in _WIDTHS:
        return size.hidden
    if name.startswith("vocab_size") or name == "padded_vocab_size":
        return min(value, VOCABULARY)
    if name.startswith(("linear_num_", "linear_n")):
        return _linear_heads(value, whole)
    if name.endswith(_KV_HEADS):
        # Grouped-query attention stays grouped.
        return heads if value >= _first(whole, _HEADS, value) else 1
    if name.endswith(_HEADS) and "mamba" not in name:
        return heads
    if name.endswith(("head_dim", "kv_channels", "head_size")):
        return value if _keeps_head_dims(name, whole) else HEAD_DIM
    if name.endswith(_INNER) and value == 4 * _first(whole, _WIDTHS, 0):
        # Some models assume this ratio and read the width only.
        return 4 * size.hidden
    rules: tuple[tuple[tuple[str, ...], int], ...] = (
        (_INNER, INTERMEDIATE * max(1, size.hidden // 64)),
        (_EXPERTS, EXPERTS),
        (_PER_TOKEN, EXPERTS_PER_TOKEN),
        (_GROUPS, 1),
        (_POSITIONS, POSITIONS),
        (("sliding_window", "sliding_window_size", "window_size"), WINDOW),
        (("attention_chunk_size",), CHUNK),
        (("q_lora_rank", "hidden_size_per_layer_input"), 32),
        (("mamba_dt_rank", "time_step_rank"), max(1, size.hidden // 16)),
        (("mamba_d_state", "ssm_state_size", "state_size"), 32),
        (("rotary_dim",), HEAD_DIM // 2),
        (_DENSE_FIRST + ("num_kv_shared_layers",), 1),
        (_DRAFTS, 0),
    )
    for names, most in rules:
        if name.endswith(names):
            return min(value, most)
    return value


def _first(whole: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    numbers = [whole[name] for name in names if isinstance(whole.get(name), int)]
    return numbers[0] if numbers else default


def _linear_heads(value: int, whole: dict[str, Any]) -> int:
    """Return the number of linear-attention heads, keeping the ratio of key to value heads."""
    counts = [
        count
        for name, count in whole.items()
        if name.startswith(("linear_num_", "linear_n")) and _is_count(count)
    ]
    least = max(1, math.gcd(*counts) if counts else value)
    return max(1, value // least) * (2 if min(counts, default=2) > 1 else 1)


def _keeps_head_dims(name: str, whole: dict[str, Any]) -> bool:
    """Return whether head widths are kept, because several of them must match each other."""
    if name.startswith(("linear_", "mamba", "index_", "conv")):
        return True
    return "qk_nope_head_dim" in whole or "v_head_dim" in whole


def _other_heads(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a different head width for layers that override it, so that widths still differ."""
    return {"head_dim": OTHER_HEAD_DIM} if "head_dim" in fields else {}


def _token(name: str, value: Any) -> Any:
    """Return special token ids that exist in the small vocabulary."""
    if isinstance(value, list):
        return [_token(name, token_id) for token_id in value]
    if not isinstance(value, int) or value < VOCABULARY:
        return value
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)


def _fit_attention(fields: dict[str, Any], config: dict[str, Any]) -> None:
    """Keep the ratio of attention's input width to the stream's width, in place."""
    wide = config.get("attention_hidden_size")
    if isinstance(wide, int) and {"hidden_size", "num_attention_heads"} <= config.keys():
        fields["attention_hidden_size"] = wide // config["hidden_size"] * fields["hidden_size"]
        heads = fields["num_attention_heads"]
        fields["attention_head_dim"] = fields["attention_hidden_size"] // heads


def _fit_mamba(fields: dict[str, Any], size: Size) -> None:
    """Set the Mamba mixer's width to `expand` times the stream's, and its heads to match."""
    expand = next((fields[name] for name in _EXPANDS if name in fields), None)
    if expand is None:
        return
    inner = int(expand * size.hidden)
    for heads, width in _MAMBA_HEADS:
        if heads == "num_heads" and "num_attention_heads" in fields:
            continue
        if isinstance(fields.get(heads), int) and isinstance(fields.get(width), int):
            if inner % fields[width]:
                fields[width] = HEAD_DIM
            fields[heads] = inner // fields[width]
    for name in ("mamba_d_ssm", "mamba_intermediate"):
        if isinstance(fields.get(name), int):
            fields[name] = inner
    if "n_groups" in fields:
        fields["n_groups"] = 1


def _fit_rope(fields: dict[str, Any], config: dict[str, Any]) -> None:
    """Replace RoPE scalings that list one factor per frequency, in place; sections of multimodal
    RoPE are shrunk to the head's width.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
            head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
            fields[name] = {**rope, "mrope_section": _sections(rope, int(head * partial) // 2)}
        elif isinstance(rope, dict) and any(isinstance(setting, list) for setting in rope.values()):
            theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
            partial = rope.get("partial_rotary_factor", 1.0)
            fields[name] = {
                "rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial,
            }  # fmt: skip


def _sections(rope: dict[str, Any], count: int) -> list[int]:
    """Return the numbers of frequencies of each position, `count` together."""
    whole = sum(rope["mrope_section"])
    others = [section * count // whole for section in rope["mrope_section"][1:]]
    return [count - sum(others), *others]
