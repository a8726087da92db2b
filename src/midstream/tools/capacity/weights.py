"""Number of weights of a model, computed from the fields of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.validation import is_int

# Families whose layers consist of attention and a gated MLP of three matrices, or experts of that
# kind. Layers of other families may contain something else, so a count would be a guess.
GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "deepseek_v3",
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of a model's weights, without norms and biases, which are about 0.01 %.

    Attributes:
        total: all weights, embeddings included.
        met: weights of the layers that are active for one token; of experts, only the chosen ones.
        heads_width: number of heads · head width, which attention's own products are proportional
            to.
        has_experts: whether some layers have routed experts.
    """

    total: int
    met: int
    heads_width: int
    has_experts: bool


def count_weights(config: Mapping[str, Any]) -> Weights | None:
    """Count the weights of a model; return None for an unknown family or a missing field.

    Args:
        config: fields of config.json.
    """
    if config.get("model_type") not in GATED or not all(is_int(config.get(n)) for n in _NEEDED):
        return None
    hidden, layers, heads, vocabulary = (int(config[name]) for name in _NEEDED)
    attention, width = _attention(config, hidden, heads)
    total = met = 0
    mixed = False
    for layer in range(layers):
        routed = has_experts(config, layer)
        mixed |= routed
        every, some = _experts(config, hidden) if routed else _dense(config, hidden)
        total += attention + every
        met += attention + some
    tied = config.get("tie_word_embeddings", str(config["model_type"]).startswith("gemma"))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return Weights(total + embeddings, met, width, mixed)


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Return (weights of a layer's attention, number of heads · head width)."""
    if config.get("kv_lora_rank") is not None:
        return _latent_attention(config, hidden, heads)
    width = int(config.get("head_dim") or hidden // heads)
    pairs = int(config.get("num_key_value_heads") or heads)
    return 2 * hidden * heads * width + 2 * hidden * pairs * width, heads * width


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Return the same as `_attention`, for multi-head latent attention (MLA)."""
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    narrow = config.get("q_lora_rank")
    queries = heads * (plain + rope)
    made = hidden * queries if narrow is None else int(narrow) * (hidden + queries)
    keys = hidden * (rank + rope) + rank * heads * (plain + value)
    return made + keys + heads * value * hidden, heads * (plain + rope + value) // 2


def _dense(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    weights = 3 * hidden * int(config["intermediate_size"])
    return weights, weights


def _experts(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Return (all weights of a layer with experts, weights active for one token)."""
    one = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    count, chosen = experts_of(config), int(config["num_experts_per_tok"])
    shared = one * int(config.get("n_shared_experts") or 0)
    shared += 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0)
    router = hidden * count
    return count * one + shared + router, chosen * one + shared + router


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts; 0 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has routed experts."""
    if not experts_of(config):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    step = int(config.get("decoder_sparse_step") or 1)
    return layer >= int(config.get("first_k_dense_replace") or 0) and (layer + 1) % step == 0
