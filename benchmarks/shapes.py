"""Model shapes for random weights: with load_format=dummy, vLLM needs only a config.json.

30b-a3b has a quarter of the layers of Qwen3-30B-A3B, a mixture of 128 experts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
# The same shape with weights that vLLM turns to FP8 when it loads them.
QUANTISED = {"8b-fp8": "fp8"}
SHAPES["8b-fp8"] = SHAPES["8b"]


def write(name: str, folder: Path, tokenizer: Path | None = None) -> Path:
    """Write a folder with the shape's config.json, and return it.

    Args:
        name: key of `SHAPES`.
        folder: its parent.
        tokenizer: a model whose tokenizer is copied; its tokens must be tokens of the shape.
    """
    target = folder / (f"shape-{name}" if tokenizer is None else f"shape-{name}-with-tokenizer")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    for file in () if tokenizer is None else ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, target / file)
    return target
