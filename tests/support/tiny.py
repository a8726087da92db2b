"""Tiny random models, built with transformers and saved for both sides to load."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf

VOCAB = 199
HIDDEN = 64
LAYERS = 3


@dataclass(frozen=True)
class Tiny:
    """One architecture."""

    config: Callable[[], hf.PretrainedConfig]  # makes its configuration
    layers: str = "model.layers"  # where transformers keeps the layers
    # The module whose input is resid_mid; None where the architecture has no such place.
    mid: str | None = "post_attention_layernorm"


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 1, "head_dim": 32}
_SANDWICH = "pre_feedforward_layernorm"


def _gemma3() -> hf.PretrainedConfig:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return hf.Gemma3TextConfig(
        **_GROUPED, layer_types=kinds, sliding_window=16, query_pre_attn_scalar=32
    )


MODELS: dict[str, Tiny] = {
    "llama": Tiny(lambda: hf.LlamaConfig(**_GROUPED)),
    "qwen2": Tiny(lambda: hf.Qwen2Config(**{**_COMMON, "num_key_value_heads": 1})),
    "qwen3": Tiny(lambda: hf.Qwen3Config(**_GROUPED)),
    "gemma2": Tiny(
        lambda: hf.Gemma2Config(**_GROUPED, sliding_window=16, query_pre_attn_scalar=32),
        mid=_SANDWICH,
    ),
    "gemma3": Tiny(_gemma3, mid=_SANDWICH),
    "gpt2": Tiny(
        lambda: hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=2,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
        ),  # fmt: skip
        layers="transformer.h",
        mid="ln_2",
    ),
    "opt": Tiny(
        lambda: hf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            ffn_dim=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            max_position_embeddings=512,
            word_embed_proj_dim=HIDDEN,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),  # fmt: skip
        layers="model.decoder.layers",
        mid="final_layer_norm",
    ),
    "mixtral": Tiny(
        lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)
    ),
    "phi": Tiny(
        # vLLM's own Phi, which it has until 0.30, takes no other intermediate_size than this.
        lambda: hf.PhiConfig(
            **{**_COMMON, "num_key_value_heads": 2, "intermediate_size": 4 * HIDDEN},
            partial_rotary_factor=0.5,
        ),
        mid=None,
    ),
    "phi3": Tiny(
        lambda: hf.Phi3Config(**{**_COMMON, "num_key_value_heads": 1}),
    ),
}

# Its experts' module calls the router itself.
QWEN3_MOE = Tiny(
    lambda: hf.Qwen3MoeConfig(
        **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    )
)
# Four streams (AltUp); its last layer uses the keys and values of another.
GEMMA3N = Tiny(
    lambda: hf.Gemma3nTextConfig(
        **_GROUPED, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16,
        altup_num_inputs=4, laurel_rank=8, num_kv_shared_layers=1, sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        activation_sparsity_pattern=[0.5, 0.0, 0.0],
    )
)  # fmt: skip
# Its experts beside shared ones, with a correction bias and groups; its attention is latent.
DEEPSEEK_V3 = Tiny(
    lambda: hf.DeepseekV3Config(
        **_COMMON, num_key_value_heads=2, kv_lora_rank=512, q_lora_rank=None, v_head_dim=16,
        qk_nope_head_dim=16, qk_rope_head_dim=64, n_routed_experts=8, n_group=2, topk_group=1,
        topk_method="noaux_tc", num_experts_per_tok=2, first_k_dense_replace=1, n_shared_experts=1,
        moe_intermediate_size=48,
    )
)  # fmt: skip


def make(name: str, folder: Path, spec: Tiny | None = None) -> Path:
    """Saves the model `name`, or another one by that name, with weights large enough that every
    layer matters.
    """
    target = folder / name
    if not (target / "config.json").exists():
        torch.manual_seed(sum(map(ord, name)))
        model = hf.AutoModelForCausalLM.from_config((spec or MODELS[name]).config()).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(target)
    return target
