"""Whole small configurations of multimodal architectures whose configuration class is vLLM's own,
for scripts/models_survey.py.
"""

from __future__ import annotations

from typing import Any

from survey_bare import DEEPSEEK_V4, INKLING, STEP3P5
from survey_multimodal_bare import INTERN, LLAMA, MROPE, QWEN2, QWEN3, SIGLIP, SIZES, text

_DEEPSEEK = {
    "use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0, "v_head_dim": 0, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
_LATENT = {
    **_DEEPSEEK, "use_mla": True, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_OCR = {
    "language_config": text("deepseek_v2", "DeepseekV2ForCausalLM", **_DEEPSEEK),
    "vision_config": {"image_size": 1024, "width": {"clip-l-14-224": {"width": 1024}}},
    "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": 64},
    "tile_tag": "2D", "global_view_pos": "head",
}  # fmt: skip
_MOON_VIT = {
    "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "num_attention_heads": 2,
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
}  # fmt: skip
_MOONDREAM = {
    "model_type": "moondream3",
    "config": {
        "text": {
            "dim": 64, "ff_dim": 96, "n_layers": 3, "vocab_size": 199, "max_context": 512,
            "n_heads": 2, "n_kv_heads": 2, "prefix_attn": 0,
            "moe": {"start_layer": 1, "n_experts": 4, "n_experts_per_tok": 2,
                    "expert_inner_dim": 48},
        },
        "vision": {
            "enc_dim": 64, "enc_patch_size": 14, "enc_n_layers": 2, "enc_ff_dim": 96,
            "enc_n_heads": 2, "proj_inner_dim": 96, "crop_size": 56, "max_crops": 2,
        },
    },
}  # fmt: skip
_WHISPER = {
    "model_type": "whisper", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96, "decoder_layers": 2, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 96, "vocab_size": 199,
}  # fmt: skip
_FOPE = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6],
    "mrope_interleaved": True, "fope_init_factor": 0.5, "fope_sep_head": True, "num_inv_freq": None,
}  # fmt: skip
_NEMOTRON = {
    "text_config": text(
        "nemotron_h", "NemotronHForCausalLM", num_hidden_layers=4,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], mamba_num_heads=4,
        mamba_head_dim=32, n_groups=1, ssm_state_size=32, conv_kernel=4, expand=2,
        mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, chunk_size=128, dtype="float32",
    ),
    "vision_config": {"args": {"model": "vit_small_patch16_224"}, "patch_size": 16},
    "force_image_size": 224, "patch_size": 16, "template": "nemotron", "downsample_ratio": 0.5,
    "ps_version": "v2", "image_tag_type": "internvl", "vit_hidden_size": 384,
    "projector_hidden_size": 64, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3,
    "img_context_token_id": 3, "img_context_token": "<image>",
}  # fmt: skip
_OVIS_LLM = {**QWEN2, "architectures": ["Qwen2ForCausalLM"]}
_QWEN_VIT = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
    "fullatt_block_indexes": [1], "in_channels": 3, "hidden_act": "silu",
}  # fmt: skip
_MIMO = {
    "num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1],
    "layernorm_epsilon": 1e-5, "sliding_window": 64, "sliding_window_size": 64, "head_dim": 192,
    "v_head_dim": 128, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1,
    "swa_head_dim": 192, "swa_v_head_dim": 128, "rope_theta": 5e6, "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": None, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "attention_bias": False, "attention_value_scale": 1.0,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
}  # fmt: skip
BARE: dict[str, dict[str, Any]] = {
    "BagelForConditionalGeneration": {
        "model_type": "bagel", "llm_config": QWEN2, "vit_config": SIGLIP,
        "vit_max_num_patch_per_side": 8,
    },
    "BailingMoeV3VLForConditionalGeneration": {
        "model_type": "bailing_moe_v3_vl",
        "text_config": {
            **SIZES, "num_hidden_layers": 4, "layer_group_size": 2, "num_experts": 4,
            "no_kda_lora": True,
            "num_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
            "first_k_dense_replace": 1, "head_dim": 128,
            "rope_parameters": {**MROPE, "mrope_section": [12, 10, 10]},
            "moe_router_enable_expert_bias": False, "score_function": "softmax",
            "scoring_func": "softmax",
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2,
            "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
    },
    "DeepseekOCR2ForCausalLM": {"model_type": "deepseek_vl_v2", **_OCR},
    "DeepseekOCRForCausalLM": {"model_type": "deepseek_vl_v2", **_OCR},
    "DeepseekV41ForCausalLM": {
        "model_type": "deepseek_v41",
        "text_config": {**SIZES, "rope_theta": 10000.0, **DEEPSEEK_V4},
        "vision_config": {
            "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
            "intermediate_size": 96,
        },
    },
    "DeepseekV4ForConditionalGeneration": {
        **text("deepseek_v4", "DeepseekV4ForConditionalGeneration", **DEEPSEEK_V4),
        "rope_theta": 10000.0, "vision_n_layers": 2, "vision_dim": 64, "vision_n_heads": 2,
        "vision_inter_dim": 96,
    },
    "DeepseekVLV2ForCausalLM": {
        "model_type": "deepseek_vl_v2", **_OCR,
        "vision_config": {"width": 1152, "layers": 2, "heads": 16, "patch_size": 14},
        "projector_config": {"input_dim": 1152, "n_embed": 64},
        "candidate_resolutions": [[384, 384]],
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        **text("ernie4_5_moe_vl", "Ernie4_5_VLMoeForConditionalGeneration"),
        "vision_config": {
            "depth": 2, "embed_dim": 64, "hidden_size": 64, "hidden_act": "quick_gelu",
            "mlp_ratio": 4, "num_heads": 2, "in_channels": 3, "patch_size": 14,
            "spatial_merge_size": 2,
        },
        "pixel_hidden_size": 64, "use_temporal_conv": True, "spatial_conv_size": 2,
        "temporal_conv_size": 2, "im_patch_id": 3, "image_token_id": 3, "video_token_id": 4,
        "moe_num_experts": [4, 4], "moe_intermediate_size": [48, 48], "moe_k": 2,
        "moe_num_shared_experts": 1, "moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 2],
        "moe_layer_interval": 1, "use_bias": False, "freq_allocation": 4,
    },
    "FireRedASR2ForConditionalGeneration": {
        **text("qwen2", "FireRedASR2ForConditionalGeneration"), "encoder_downsample_rate": 2,
        "audio_encoder_conf": {"idim": 80, "n_layers_enc": 2, "n_head": 2, "d_model": 64},
    },
    "FunASRForConditionalGeneration": {
        **text("qwen3", "FunASRForConditionalGeneration"),
        "audio_encoder_conf": {"output_size": 512, "num_blocks": 2, "tp_blocks": 1},
    },
    "FunAudioChatForConditionalGeneration": {
        "model_type": "funaudiochat", "text_config": QWEN3,
        "audio_config": {
            "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96,
            "d_model": 64, "output_dim": 64, "codebook_size": 64, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "crq_transformer_config": QWEN3,
        },
        "hidden_size": 64, "audio_token_index": 3,
    },
    "HCXVisionV2ForCausalLM": {
        "model_type": "hyperclovax_vision_v2", "text_config": LLAMA, "image_token_id": 3,
        "video_token_id": 4, "vision_config": {**_QWEN_VIT, "model_type": "qwen2_5_vl"},
    },
    "HfMoondream": _MOONDREAM,
    "IsaacForConditionalGeneration": {
        "model_type": "isaac", "text_config": {**QWEN3, "rope_parameters": MROPE,
        "rope_scaling": MROPE},
        "vision_config": {**SIGLIP, "model_type": "pixel_shuffle_siglip2", "num_patches": 16,
                          "pixel_shuffle_scale_factor": 2},
        **SIZES, "rope_parameters": MROPE, "rope_scaling": MROPE,
    },
    "InklingForConditionalGeneration": {
        "model_type": "inkling_mm_model",
        "text_config": {**SIZES, "model_type": "inkling_model", **INKLING},
        "audio_config": {}, "vision_config": {},
    },
    "InternS1ForConditionalGeneration": {
        "model_type": "interns1", "text_config": QWEN3, "image_token_id": 3,
        "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_config": {
            "model_type": "internvl_vision", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [56, 56],
            "patch_size": [14, 14],
        },
    },
    "InternS1ProForConditionalGeneration": {
        "model_type": "interns1_pro", "image_token_id": 3, "video_token_id": 4,
        "vision_start_token_id": 3,
        "text_config": text(
            "interns1_pro_text", "InternS1ProForConditionalGeneration", rope_scaling=_FOPE,
            rope_parameters=_FOPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
            decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
        ),
        "vision_config": {
            "model_type": "qwen3_vl_vision", "depth": 2, "hidden_size": 64, "num_heads": 2,
            "intermediate_size": 96, "out_hidden_size": 64, "patch_size": 16,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
    },
    "LlavaOnevision2ForConditionalGeneration": {
        "model_type": "llava_onevision2", "text_config": QWEN3, "image_token_id": 3,
        "video_token_id": 4,
        "vision_config": {
            **SIGLIP, "model_type": "llava_onevision2_vision", "spatial_merge_size": 2,
            "rope_theta": 10000.0, "num_channels": 3,
        },
    },
    "Molmo2ForConditionalGeneration": {
        "model_type": "molmo2", "image_patch_id": 3, "image_start_token_id": 3,
        "image_end_token_id": 3, "image_col_id": 3, "image_low_res_id": 3,
        "low_res_image_start_token_id": 3, "frame_start_token_id": 3, "frame_end_token_id": 3,
        "text_config": text(
            "molmo2_text", "Molmo2ForConditionalGeneration", additional_vocab_size=8,
            layer_norm_eps=1e-6, norm_after=False, qk_norm_type="qwen3", qkv_bias=False,
            use_qk_norm=True, rope_scaling_layers=None, rope_theta=10000.0, embedding_dropout=0.0,
        ),
        "vit_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            "image_default_input_size": [56, 56], "image_patch_size": 14, "image_num_pos": 17,
        },
        "adapter_config": {
            "vit_layers": [-1, -2], "pooling_attention_mask": True, "hidden_size": 64,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "hidden_act": "silu", "intermediate_size": 96, "text_hidden_size": 64,
        },
    },
    "KimiVLForConditionalGeneration": {
        "model_type": "kimi_vl",
        "text_config": text("deepseek_v3", "DeepseekV3ForCausalLM", **_LATENT),
        "vision_config": _MOON_VIT, "media_placeholder_token_id": 3,
    },
    "MiDashengLMModel": {
        "model_type": "midashenglm",
        "text_config": {**SIZES, "architectures": ["Qwen2ForCausalLM"]},
        "audio_encoder_config": {"embed_dim": 64, "depth": 2, "num_heads": 2},
        "subsample_factor": 5, "audio_token_id": 3,
    },
    "MiMoV2OmniForCausalLM": {
        **text("mimo_v2_omni", "MiMoV2OmniForCausalLM", **_MIMO),
        "image_token_id": 3, "video_token_id": 4, "audio_token_id": 4,
        "vision_config": {
            **_QWEN_VIT, "patch_size": 16, "num_key_value_heads": 1, "tokens_per_second": 2,
            "kv_channels": 32, "qk_channels": 32, "num_query_groups": 1, "use_sink": False,
            "vit_window_attn_types": [-1, -1], "visual_token_window_size": 64,
        },
    },
    "MossAudioModel": {
        **SIZES, "model_type": "moss_audio", "language_config": QWEN3, "adapter_hidden_size": 64,
        "audio_config": {
            "d_model": 64, "output_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 96, "downsample_hidden_size": 32,
            "deepstack_encoder_layer_indexes": [0],
        },
        "audio_token_id": 3,
    },
    "MoonshotKimiaForCausalLM": {
        **text("kimi_audio", "MoonshotKimiaForCausalLM"), "kimia_adaptor_input_dim": 256,
        "kimia_media_begin": 3, "kimia_media_end": 3,
    },
    "Moondream3ForCausalLM": _MOONDREAM,
    "MossTranscribeDiarizeForConditionalGeneration": {
        "model_type": "moss_transcribe_diarize", "text_config": QWEN3, "audio_config": _WHISPER,
        "audio_token_id": 3,
    },
    "NemotronParseForConditionalGeneration": {
        "model_type": "nemotron_parse", "is_encoder_decoder": True, "hidden_size": 64,
        "vocab_size": 199, "image_size": [64, 64], "num_attention_heads": 2,
        "decoder": {
            "model_type": "mbart", "d_model": 64, "decoder_layers": 2, "vocab_size": 199,
            "decoder_attention_heads": 2, "decoder_ffn_dim": 96, "max_position_embeddings": 512,
        },
        "encoder": {"args": {"model": "vit_huge_patch16_224"}, "patch_size": 16},
    },
    "OpenVLAForActionPrediction": {"model_type": "openvla", "text_config": LLAMA,
                                   "image_token_index": 3},
    "Ovis": {
        "model_type": "ovis", "llm_config": _OVIS_LLM, "hidden_size": 64,
        "visual_tokenizer_config": {
            "model_type": "siglip_visual_tokenizer", "vocab_size": 128, "hidden_stride": 2,
            "backbone_config": SIGLIP,
        },
    },
    "QianfanOCRForConditionalGeneration": {
        "model_type": "qianfan_ocr", "text_config": QWEN3, **INTERN,
        "vision_config": {**INTERN["vision_config"], "model_type": "qianfan_ocr_vision"},
        "image_token_id": 3,
    },
    "Step3p7ForConditionalGeneration": {
        "model_type": "step3p7_vl", "image_token_id": 3, "understand_projector_stride": 2,
        "projector_bias": False,
        "text_config": text(
            "step3p5_text", "Step3p5ForCausalLM", **STEP3P5, rope_theta=10000.0,
            attention_other_setting=None, swiglu_limits=None, swiglu_limits_shared=None,
        ),
        "vision_config": {
            "width": 64, "layers": 2, "heads": 2, "patch_size": 14, "image_size": 56,
            "mlp_ratio": 1.5, "output_dim": 64, "use_rope2d": True, "use_ln_pre": True,
            "use_ln_post": False, "use_cls_token": False, "use_abs_posemb": True,
            "ls_init_value": 0.1, "hidden_act": "quick_gelu", "num_channels": 3,
            "layer_norm_eps": 1e-5,
        },
    },
    "Step3VLForConditionalGeneration": {
        "model_type": "step3_vl", "image_token_id": 3, "understand_projector_stride": 2,
        "projector_bias": False,
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "output_hidden_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        },
        "text_config": {
            "architectures": ["Step3TextForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
            "num_attention_heads": 2, "num_attention_groups": 1, "num_hidden_layers": 3,
            "max_seq_len": 512, "vocab_size": 199, "moe_intermediate_size": 48,
            "moe_num_experts": 4, "moe_top_k": 2, "max_position_embedding": 512,
            "share_expert_dim": 48, "share_q_dim": 64, "head_dim": 32, "moe_layers_enum": "1,2",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "UltravoxModel": {
        "model_type": "ultravox", "text_config": LLAMA, "audio_config": _WHISPER,
        "vocab_size": 199, "audio_token_index": 3, "hidden_size": 64, "projector_ln_mid": True,
    },
    "UnlimitedOCRForCausalLM": {"model_type": "unlimited-ocr", **_OCR},
}  # fmt: skip
for _name in (
    "Nano_VL_V2",
    "Nano_Omni_Reasoning_V3",
    "Super_Omni_Reasoning_V3",
    "Omni_Reasoning_V3",
):
    BARE[f"NemotronH_{_name}"] = {"model_type": f"NemotronH_{_name}", **_NEMOTRON}
