"""Whole small configurations of multimodal architectures whose configuration class is vLLM's own,
for scripts/models_survey.py.
"""

from __future__ import annotations

from typing import Any

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
    "DeepseekVLV2ForCausalLM": {
        "model_type": "deepseek_vl_v2", **_OCR,
        "vision_config": {"width": 1152, "layers": 2, "heads": 16, "patch_size": 14},
        "projector_config": {"input_dim": 1152, "n_embed": 64},
        "candidate_resolutions": [[384, 384]],
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
    "HfMoondream": _MOONDREAM,
    "IsaacForConditionalGeneration": {
        "model_type": "isaac", "text_config": {**QWEN3, "rope_parameters": MROPE,
        "rope_scaling": MROPE},
        "vision_config": {**SIGLIP, "model_type": "pixel_shuffle_siglip2", "num_patches": 16,
                          "pixel_shuffle_scale_factor": 2},
        **SIZES, "rope_parameters": MROPE, "rope_scaling": MROPE,
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
    "Moondream3ForCausalLM": _MOONDREAM,
    "MossTranscribeDiarizeForConditionalGeneration": {
        "model_type": "moss_transcribe_diarize", "text_config": QWEN3, "audio_config": _WHISPER,
        "audio_token_id": 3,
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
