"""An EAGLE head that needs no training: it drafts the last sampled token again and again, which is
right where a model repeats itself and wrong elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch


def make_eagle_head(model: Path, out: Path) -> Path:
    """Saves the head for a Llama.

    The head's one layer adds nothing, and what it is fed passes: the model's last hidden state,
    whose most likely token is the one that was just sampled.
    """
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    config.update(num_hidden_layers=1, architectures=["LlamaForCausalLM"], model_type="llama")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {f"layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file(weights, out / "model.safetensors")
    return out
