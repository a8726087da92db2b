"""Settings of multimodal architectures for scripts/models_survey.py."""

from __future__ import annotations

from typing import Any

import survey_multimodal_bare
import survey_multimodal_vllm
import survey_settings

# Architectures of vLLM whose configuration has this model type, in transformers or in vLLM.
TYPES: dict[str, str] = {
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3",
    "BagelForConditionalGeneration": "bagel",
    "BailingMoeV3VLForConditionalGeneration": "bailing_moe_v3_vl",
    "Cosmos3ForConditionalGeneration": "cosmos3_omni",
    "DeepseekOCR2ForCausalLM": "deepseek_vl_v2",
    "DeepseekOCRForCausalLM": "deepseek_vl_v2",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekVLV2ForCausalLM": "deepseek_vl_v2",
    "Dots3NoteForCausalLM": "dots3_note",
    "FunAudioChatForConditionalGeneration": "funaudiochat",
    "HfMoondream": "moondream3",
    "InternS2MobiusForConditionalGeneration": "qwen3_5_moe",
    "InternS2PreviewForConditionalGeneration": "qwen3_5_moe",
    "IsaacForConditionalGeneration": "isaac",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "LightOnOCRForConditionalGeneration": "mistral3",
    "MiDashengLMModel": "midashenglm",
    "Moondream3ForCausalLM": "moondream3",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize",
    "OpenVLAForActionPrediction": "openvla",
    "Ovis": "ovis",
    "Qwen2_5OmniModel": "qwen2_5_omni",
    "Qwen3ASRRealtimeGeneration": "qwen3_asr",
    "Step3VLForConditionalGeneration": "step3_vl",
    "UltravoxModel": "ultravox",
    "UnlimitedOCRForCausalLM": "unlimited-ocr",
    "VoxtralRealtimeGeneration": "voxtral_realtime",
}
# Special tokens of architectures that look for these in their tokenizer as they are built.
TOKENIZERS: dict[str, list[str]] = {
    name: ["<image>", "<｜▁pad▁｜>"]
    for name in (
        "DeepseekOCR2ForCausalLM",
        "DeepseekOCRForCausalLM",
        "DeepseekVLV2ForCausalLM",
        "IsaacForConditionalGeneration",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "UnlimitedOCRForCausalLM",
    )
}
# Those that Inkling's renderer looks for.
_MESSAGES = [
    f"<|{mark}|>"
    for mark in (
        "message_user", "message_model", "message_system", "message_tool", "content_text",
        "content_image", "content_model_end_sampling", "content_thinking", "content_audio_input",
        "content_xml", "content_invoke_tool_json", "end_message", "audio_end",
    )
]  # fmt: skip
TOKENIZERS |= dict.fromkeys(("InklingForCausalLM", "InklingForConditionalGeneration"), _MESSAGES)
_VOXTRAL = {
    "downsample_factor": 4,
    "window_size": 400,
    "hop_length": 160,
    "sampling_rate": 16000,
    "global_log_mel_max": 1.5,
}
# Fields of a configuration, by architecture or model type, that its class's defaults lack or have
# too large.
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_asr": {
        "transf_decoder": {"config_dict": {"num_attention_heads": 8, "hidden_size": 1024}},
        "encoder": {"n_heads": 8},
    },
    "cohere_compass": {
        "tie_word_embeddings": True,
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        },
    },
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "spatial_vision_layer": -1,
        "downsample_rate": "1/2",
        "text_config": {"model_type": "granite", **survey_settings.SETTINGS["granite"]},
    },
    "InternS2MobiusForConditionalGeneration": {"text_config": {"num_blocks": 2}},
    "voxtral": {"audio_config": _VOXTRAL},
    "voxtral_realtime": {
        "audio_config": _VOXTRAL,
        "text_config": {"architectures": ["MistralForCausalLM"]},
    },
    "glm5_next": {"text_config": survey_settings.SETTINGS["glm5_next_text"]},
    "qwen4_exp": {
        "text_config": survey_settings.SETTINGS["qwen4_exp_text"],
        "vision_config": {"deepstack_visual_indexes": []},
    },
    "lfm2_vl": {"text_config": survey_settings.SETTINGS["lfm2"]},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "qwen3_omni_moe": {
        "thinker_config": {
            "vision_config": {"image_size": 224, "apply_vit_abs_pos_embed": True},
            "text_config": {"tie_word_embeddings": False},
        }
    },
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}
# Whole small configurations of model types that transformers lacks.
BARE: dict[str, dict[str, Any]] = survey_multimodal_bare.BARE | survey_multimodal_vllm.BARE


def config_of(name: str, model_type: str) -> Any:
    """Return the configuration of an architecture, whole or of its class's defaults."""
    from transformers import CONFIG_MAPPING

    from midstream.lab.tools.doctor.model_copy import unknown_config

    fields = SETTINGS.get(name, SETTINGS.get(model_type, {}))
    settings = {"architectures": [name], **fields}
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type](**settings)
    return unknown_config({"model_type": model_type, **settings})
