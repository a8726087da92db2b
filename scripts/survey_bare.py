"""Whole configurations of architectures that transformers has no class of, for
scripts/models_survey.py. Their weights are drawn in the engine.
"""

from __future__ import annotations

from typing import Any

_SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_BAILING = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "output_dropout": 0.0,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 48, "use_qk_norm": True, "score_function": "softmax",
    "moe_router_enable_expert_bias": False, "partial_rotary_factor": 1.0,
}  # fmt: skip
_DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V4 = {
    "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "num_key_value_heads": 1, "num_attention_heads": 2, "sliding_window": 128,
    "compress_ratios": [0, 4, 128], "compress_rope_theta": 10000.0, "index_topk": 512,
    "index_n_heads": 2, "index_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hash_layers": 1,
    "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0, "swiglu_limit": 10.0, "hc_mult": 4, "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20, "expert_dtype": "bf16",
}  # fmt: skip
INKLING = {
    "vocab_size": 512, "d_rel": 16, "rel_extent": 64, "local_layer_ids": [0, 1],
    "sliding_window_size": 64, "use_sconv": True, "sconv_kernel_size": 4, "dense_mlp_idx": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "dense_intermediate_size": 96, "use_embed_norm": True, "shared_expert_sink": True,
}  # fmt: skip
_MINIMAX_M3 = {
    "intermediate_size": 48, "dense_intermediate_size": 96, "shared_intermediate_size": 48,
    "use_gemma_norm": True, "attention_output_gate": False, "rotary_dim": 16,
    "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0, "swiglu_limit": 7.0, "use_qk_norm": True, "qk_norm_type": "per_head",
    "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "scoring_func": "softmax", "use_routing_bias": False, "routed_scaling_factor": 1.0,
    "num_mtp_modules": 0, "moe_layer_freq": [0, 1, 1], "sparse_attention_config": None,
}  # fmt: skip
_EXAONE = {"activation_function": "silu", "num_layers": 3, "layer_norm_epsilon": 1e-6}
_MINICPM = {
    "scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 32, "num_experts": 0,
    "num_experts_per_tok": 0,
}  # fmt: skip
_SOLAR = {
    "bskcn_1": [1], "bskcn_2": [1], "bskcn_3": [1], "bskcn_4": [1], "bskcn_tv": [0.9, 0.8],
    "attention_bias": False, "mlp_bias": False, "sliding_window": None,
}  # fmt: skip
STEP3P5 = {
    "num_attention_groups": 1, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 48,
    "moe_intermediate_size": 48, "moe_layers_enum": "1,2", "moe_router_scaling_factor": 1.0,
    "norm_expert_weight": True, "layer_types": ["full_attention"] * 3, "sliding_window": 64,
    "use_moe_router_bias": True, "moe_router_activation": "softmax", "need_fp32_gate": True,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": False, "yarn_only_types": [], "partial_rotary_factors": [1.0] * 3,
    "rope_parameters": None,
}  # fmt: skip
_SARVAM = {
    **_DEEPSEEK, "num_experts": 4, "num_shared_experts": 1, "use_qkv_bias": False,
    "use_bias": False, "score_function": "softmax", "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "moe_router_enable_expert_bias": False, "use_qk_norm": True,
    "embedding_dropout": 0.0, "output_dropout": 0.0, "partial_rotary_factor": 1.0,
}  # fmt: skip

_BAILING_LINEAR = {
    **_BAILING, "num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 128,
    "kv_lora_rank": 512, "q_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "short_conv_kernel_size": 4, "group_norm_size": 1, "rope_interleave": True,
    "partial_rotary_factor": 0.5, "no_kda_lora": True,
}  # fmt: skip
_DBRX = {
    "d_model": 64, "n_heads": 2, "n_layers": 3, "max_seq_len": 512,
    "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": None},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2,
                   "ffn_act_fn": {"name": "silu"}, "moe_normalize_expert_weights": 1.0},
}  # fmt: skip
_TELECHAT = {
    "add_bias_linear": False, "seq_length": 512, "n_layer": 3, "n_head": 2, "n_embed": 64,
    "ffn_hidden_size": 96, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_LOOP = {"max_window_layers": 3, "loop_num": 2, "loop_window_size": 64, "use_sliding_window": False}
_CHATGLM = {
    "num_layers": 3, "ffn_hidden_size": 96, "padded_vocab_size": 199, "kv_channels": 32,
    "seq_length": 512, "multi_query_attention": True, "multi_query_group_num": 1,
    "add_bias_linear": False, "add_qkv_bias": True, "layernorm_epsilon": 1e-5, "rmsnorm": True,
    "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
    "original_rope": True, "fp32_residual_connection": False, "hidden_dropout": 0.0,
}  # fmt: skip
_DECI = {
    "block_configs": [
        {
            "attention": {"no_op": layer == 1, "n_heads_in_group": 2, "replace_with_linear": False},
            "ffn": {"no_op": layer == 2, "ffn_mult": 1.5, "replace_with_linear": False},
        }
        for layer in range(4)
    ],
    "num_hidden_layers": 4,
}
_K2_HORIZON = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_gate_bias": False,
    "moe_intermediate_size": 48, "norm_topk_prob": True, "router_score_func": "softmax",
    "router_scaling_factor": 1.0, "decoder_sparse_step": 2, "mova_num_experts": 0,
    "mova_num_experts_per_tok": 0, "rope_head_dim": 16, "query_key_norm": True,
    "attention_bias": False, "attention_gate_func": "softplus", "layernorm_num_groups": 1,
}  # fmt: skip
_LATENT = {
    **_DEEPSEEK, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 1.0,
}  # fmt: skip
# Of these types vLLM reads the width of the latent rows, keys and positions, as the head's.
_LATENT_HEAD = {"head_dim": 576}
_PANGU = {**_LATENT, "sandwich_norm": True, "router_enable_expert_bias": False}
_SARVAM_LATENT = {**_LATENT, **_SARVAM, **_LATENT_HEAD, "q_lora_rank": None}
_PARAM2 = {
    **_SARVAM,
    "score_function": "softmax",
    "moe_shared_expert_intermediate_size": 48,
    "rope_scaling": None,
}
_STEP1 = {"num_attention_groups": 1, "rope_parameters": None}
_STEP3 = {
    "num_attention_groups": 1, "max_seq_len": 512, "moe_num_experts": 4, "moe_top_k": 2,
    "moe_intermediate_size": 48, "max_position_embedding": 512, "share_expert_dim": 48,
    "share_q_dim": 64, "norm_expert_weight": False, "moe_layers_enum": "1,2",
}  # fmt: skip
_PLAMO3 = {
    "interleaved_sliding_window": [64, None, 64], "rope_local_theta": 10000.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "window_size": 64, "sliding_window": 64,
}  # fmt: skip
_RNJ1 = {
    "query_pre_attn_scalar": 32, "sliding_window": 64, "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "final_logit_softcapping": None, "attn_logit_softcapping": None,
    "rope_local_base_freq": 10000.0,
}  # fmt: skip
_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "BailingMoeForCausalLM": ("bailing_moe", _BAILING),
    "BailingMoeV2ForCausalLM": ("bailing_moe_v2", _BAILING),
    "BailingMoeV2_5ForCausalLM": ("bailing_moe_linear", _BAILING_LINEAR),
    "BailingMoeV3ForCausalLM": ("bailing_moe_v3", _BAILING_LINEAR),
    "ChatGLMForConditionalGeneration": ("chatglm", _CHATGLM),
    "ChatGLMModel": ("chatglm", _CHATGLM),
    "DbrxForCausalLM": ("dbrx", _DBRX),
    "DeciLMForCausalLM": ("nemotron-nas", _DECI),
    "DeepseekForCausalLM": ("deepseek", _DEEPSEEK),
    "DeepseekV4ForCausalLM": ("deepseek_v4", DEEPSEEK_V4),
    "ExaoneForCausalLM": ("exaone", _EXAONE),
    "IQuestLoopCoderForCausalLM": ("iquestloopcoder", _LOOP),
    "InklingForCausalLM": ("inkling_model", INKLING),
    "InternLM2ForCausalLM": ("internlm2", {"bias": False}),
    "K2HorizonForCausalLM": ("k2_horizon", _K2_HORIZON),
    "MiniCPMForCausalLM": ("minicpm", _MINICPM),
    "MiniMaxM3SparseForCausalLM": ("minimax_m3_text", _MINIMAX_M3),
    "MistralLarge3ForCausalLM": ("mistral_large_3", _LATENT),
    "NanbeigeForCausalLM": ("nanbeige", {"attention_bias": False, "mlp_bias": False}),
    "OrionForCausalLM": ("orion", {}),
    "PanguEmbeddedForCausalLM": ("PanguEmbedded", {"bias": True}),
    "PanguProMoEV2ForCausalLM": ("pangu_pro_moe_v2", {**_PANGU, **_LATENT_HEAD}),
    "PanguUltraMoEForCausalLM": ("pangu_ultra_moe", _PANGU),
    "Param2MoEForCausalLM": ("param2moe", _PARAM2),
    "Plamo3ForCausalLM": ("plamo3", _PLAMO3),
    "Rnj1ForCausalLM": ("rnj1", _RNJ1),
    "SarvamMLAForCausalLM": ("sarvam_mla", _SARVAM_LATENT),
    "SarvamMoEForCausalLM": ("sarvam_moe", _SARVAM),
    "SolarForCausalLM": ("solar", _SOLAR),
    "Step1ForCausalLM": ("step1", _STEP1),
    "Step3TextForCausalLM": ("step3_text", _STEP3),
    "Step3p5ForCausalLM": ("step3p5", STEP3P5),
    "TeleChat2ForCausalLM": ("telechat", _TELECHAT),
    "TeleFLMForCausalLM": ("TeleFLM", {"use_mup": False}),
}
BARE: dict[str, dict[str, Any]] = {
    name: {**_SMALL, "model_type": model_type, "architectures": [name], **fields}
    for name, (model_type, fields) in _TYPES.items()
}
