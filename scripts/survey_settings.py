"""Settings of architectures for scripts/models_survey.py that their configurations lack.

The defaults of a configuration class do not always describe a model: some leave fields empty that
every published model sets, and some lack fields that vLLM reads.
"""

from __future__ import annotations

from typing import Any

_GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}

# Fields of a model type's configuration, as published models have them.
SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "aria_text": {"num_experts_per_tok": 6},
    "cohere_compass_text": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 6, 4]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 1},  # of a small copy's few layers
    "glm4_moe": {"head_dim": 128},
    "glm5_next_text": {
        "mhc": True,
        "topk_method": "noaux_tc",
        "scoring_func": "softmax",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 4,
    },
    "glm4_moe_lite": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 1536,
        "qk_norm": True,
        "route_norm": True,
        "num_shared_experts": 1,
    },
    "lfm2": {
        "block_dim": 2560,
        "conv_dim": 2560,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "num_hidden_layers": 4,
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 128,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
    },
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    # vLLM's CPU build has no router but with a softmax.
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "softmax"},
    "ministral": {"head_dim": 128},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "nemotron": {"num_key_value_heads": 8},
    # Of linear attention alone: vLLM's CPU build has no sparse attention.
    "qwen4_exp_text": {
        "output_gate_type": "silu",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 4,
    },
    # vLLM's CPU build has no kernel for this model's experts, so these layers have none.
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}

# The same on a GPU, by model type or architecture, where vLLM has kernels for all experts, routers
# and attentions.
ON_GPU: dict[str, dict[str, Any]] = {
    "K2HorizonForCausalLM": {"mova_num_experts": 4, "mova_num_experts_per_tok": 2},
    "minimax_m2": {"scoring_func": "sigmoid"},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}

# Engines of these run in bfloat16: the only dtype of the linear attention of vLLM's CPU build, and
# of its latent attention on CPUs with AMX.
BFLOAT16 = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp",
    "qwen4_exp_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk2", "longcat_flash",
    "youtu", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration", "MistralLarge3ForCausalLM",
    "PanguProMoEV2ForCausalLM", "PanguUltraMoEForCausalLM", "SarvamMLAForCausalLM",
    "InklingForCausalLM", "InklingForConditionalGeneration", "KimiVLForConditionalGeneration",
    "kimi_k25", "minicpmv4_6", "minicpmv4_7",
)  # fmt: skip

# Architectures of vLLM's registry whose published models include their own code, but have the same
# layout as a model type of transformers: its weights are loaded under the architecture's name.
SAME_AS: dict[str, str] = {
    "ExaoneMoEForCausalLM": "exaone_moe",
    "Glm5NextForCausalLM": "glm5_next_text",
    "IQuestCoderForCausalLM": "llama",
    "InternLM3ForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MiMoForCausalLM": "qwen2",
    "MiMoV2ForCausalLM": "mimo_v2_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    "PhiMoEForCausalLM": "phimoe",
    "TeleChat3ForCausalLM": "llama",
}

# Why vLLM's process is killed, by a debugger.
CRASHES = {
    "JetMoeForCausalLM": (
        "vLLM's Transformers backend gives its attention keys for every query head, and writes "
        "them beyond a KV cache that has room for the key heads alone"
    ),
}

# Architectures that vLLM once had its own model of, and now runs with the Transformers backend.
LEFT_TO_THE_BACKEND = (
    "BambaForCausalLM",
    "Dots1ForCausalLM",
    "MiniMaxForCausalLM",
    "PersimmonForCausalLM",
)

# Causal language models of transformers that are not decoder-only text models: encoders with a
# language-modelling head, decoders of encoder-decoder models, assistants.
NO_DECODERS = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
    "blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "gemma4_assistant",
    "gemma4_unified_assistant", "git", "marian", "mbart", "megatron-bert", "mllama", "musicgen",
    "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xmod", "fuyu", "reformer", "qdqbert", "speech_to_text_2", "xlnet",
)  # fmt: skip
