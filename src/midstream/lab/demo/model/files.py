"""Writer of a Hugging Face Llama folder from a GGUF: configs, tokenizer, weights. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.errors import ModelError
from midstream.steering.gguf import Floats, Gguf

CONTROL = 3
"""llama.cpp's token type of tokens such as <|im_start|>."""

HF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_configs(folder: Path, gguf: Gguf) -> None:
    special = {
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": gguf["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": gguf["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": gguf["llama.feed_forward_length"],
        "max_position_embeddings": gguf["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": gguf["llama.attention.head_count"],
        "num_hidden_layers": gguf["llama.block_count"],
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "rms_norm_eps": 1e-05,
        "rope_theta": gguf["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "vocab_size": gguf["llama.vocab_size"],
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)


def write_weights(folder: Path, gguf: Gguf, report: Callable[[str, float], None]) -> None:
    """Write bfloat16 model.safetensors; `report` gets each tensor's name and the fraction done."""
    num_heads = {
        "attn_q": gguf["llama.attention.head_count"],
        "attn_k": gguf["llama.attention.head_count_kv"],
    }
    state = {}
    for index, (name, tensor) in enumerate(gguf.tensors.items()):
        report(name, index / len(gguf.tensors))
        part, array = name.split(".")[-2:][0], tensor.dequantize()
        if part in num_heads:
            array = split_rotary_pairs(array, num_heads[part])
        state[hf_name(name)] = torch.from_numpy(array).bfloat16()
    path = folder / "model.safetensors"
    save_file(state, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def split_rotary_pairs(array: Floats, num_heads: int) -> Floats:
    """Convert float32 `[heads * head_dim, hidden]` from llama.cpp's row order, where the halves of
    a rotary pair are adjacent, to transformers', where they are half a head apart.
    """
    pairs = array.reshape(num_heads, -1, 2, array.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(array.shape)


def hf_name(name: str) -> str:
    """Translate a name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    part, prefix = name.removesuffix(".weight"), "model"
    if part.startswith("blk.") and part.count(".") == 2:
        _, layer, part = part.split(".")
        prefix = f"model.layers.{layer}"
    if part not in HF_NAMES:
        raise ModelError(f"GGUF: tensor {name!r} is not part of a Llama model")
    return f"{prefix}.{HF_NAMES[part]}.weight"


def write_tokenizer(folder: Path, gguf: Gguf) -> None:
    """Write tokenizer.json and tokenizer_config.json, including the chat template."""
    tokens = gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[gguf["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[gguf["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[gguf["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[gguf["tokenizer.ggml.unknown_token_id"]],
        "chat_template": gguf["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf["llama.context_length"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
