"""Tiny multimodal models with their processors, for scripts/models_survey.py.

Each has an image go through transformers' processor, vLLM's and both towers. `save` writes the
model as published ones are: with the names of their weights.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

VOCABULARY = 400
SIDE = 56  # of an image, in pixels
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_VIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": 14,
}  # fmt: skip
_SIGLIP = {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False}
_SQUARE = {"height": SIDE, "width": SIDE}
_PIXELS = {"shortest_edge": SIDE**2, "longest_edge": 112**2}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_KINDS = ["sliding_attention", "full_attention"] * 2


class Parts(NamedTuple):
    """A model's configuration, its processor, and an image's mark in a text."""

    config: Any
    processor: Any
    mark: str


def tokenizer(specials: Sequence[str], **named: str) -> Any:
    """Return the tokenizer of the tests' vision models, with these special tokens."""
    from support.tokenizers import byte_pairs  # which imports transformers

    return byte_pairs(specials, **named)


def _gemma3() -> Parts:
    import transformers as hf

    breaks = ["\n" * count for count in range(1, 5)]
    words = tokenizer(
        breaks,
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    image, start, end = words.convert_tokens_to_ids(
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    )
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **_TEXT, layer_types=_KINDS, sliding_window=64, query_pre_attn_scalar=32
        ),
        vision_config=hf.SiglipVisionConfig(**_VIT, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=start,
        eoi_token_index=end,
    )
    images = hf.Gemma3ImageProcessor(size=_SQUARE)
    return Parts(config, hf.Gemma3Processor(images, words, image_seq_length=4), "<start_of_image>")


def _gemma4() -> Parts:
    import transformers as hf

    words = tokenizer(
        [],
        image_token="<|image|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
        video_token="<|video|>",
    )
    image, start, end = words.convert_tokens_to_ids(["<|image|>", "<|image>", "<image|>"])
    text = hf.Gemma4TextConfig(
        **_TEXT, layer_types=_KINDS, sliding_window=64, global_head_dim=32,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
    )  # fmt: skip
    vision = hf.Gemma4VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, patch_size=16, pooling_kernel_size=2,
        default_output_length=70, position_embedding_size=64,
    )  # fmt: skip
    config = hf.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=image,
        boi_token_id=start, eoi_token_id=end,
    )  # fmt: skip
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(max_soft_tokens=70, pooling_kernel_size=2),
        words,
        hf.Gemma4VideoProcessor(max_soft_tokens=70, pooling_kernel_size=2),
        image_seq_length=70,
    )
    return Parts(config, processor, "<|image|>")


_QWEN = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen_tokenizer() -> tuple[Any, dict[str, int]]:
    words = tokenizer(
        ["<|im_start|>", "<|im_end|>"],
        vision_bos_token=_QWEN[0],
        vision_eos_token=_QWEN[1],
        image_token=_QWEN[2],
        video_token=_QWEN[3],
    )
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return words, dict(zip(names, words.convert_tokens_to_ids(_QWEN), strict=True))


def _qwen2(version: str) -> Parts:
    import transformers as hf

    words, ids = _qwen_tokenizer()
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    if version == "2":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
    text = {**_NO_HEAD_DIM, "rope_parameters": _MROPE, "rope_scaling": _MROPE}
    config_class = hf.Qwen2VLConfig if version == "2" else hf.Qwen2_5_VLConfig
    processor_class = hf.Qwen2VLProcessor if version == "2" else hf.Qwen2_5_VLProcessor
    config = config_class(text_config=text, vision_config=vision, **ids)
    images, videos = hf.Qwen2VLImageProcessor(size=_PIXELS), hf.Qwen2VLVideoProcessor(size=_PIXELS)
    return Parts(config, processor_class(images, words, videos), _QWEN_MARK)


def _qwen3(config_class: str, **text: Any) -> Parts:
    import transformers as hf

    words, ids = _qwen_tokenizer()
    rope = {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": 16, "spatial_merge_size": 2,
        "num_position_embeddings": 64,
    }  # fmt: skip
    if "VL" in config_class:
        vision["deepstack_visual_indexes"] = [0, 1, 2]
        text["rope_scaling"] = rope
    config = getattr(hf, config_class)(
        text_config={**_TEXT, "rope_parameters": rope, **text}, vision_config=vision, **ids
    )
    size = {"size": {"shortest_edge": 64**2, "longest_edge": 128**2}, "patch_size": 16}
    images = hf.Qwen2VLImageProcessor(**size, merge_size=2)
    videos = hf.Qwen3VLVideoProcessor(**size, merge_size=2)
    return Parts(config, hf.Qwen3VLProcessor(images, words, videos), _QWEN_MARK)


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def _mistral3(text: str) -> Parts:
    import transformers as hf

    words = tokenizer(
        ["[INST]", "[/INST]"],
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    vision = {**_VIT, "model_type": "pixtral", "head_dim": 16, "image_size": 112}
    config = hf.Mistral3Config(
        text_config={"model_type": text, **_TEXT},
        vision_config=vision,
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    images = hf.PixtralImageProcessor(
        size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
    )
    processor = hf.PixtralProcessor(
        images, words, patch_size=14, spatial_merge_size=2, image_token="[IMG]",
        image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
    )  # fmt: skip
    return Parts(config, processor, "[IMG]")


def _llava() -> Parts:
    import transformers as hf

    words = tokenizer([], image_token="<image>")
    config = hf.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_VIT, "projection_dim": 32},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    images = hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    processor = hf.LlavaProcessor(
        images, words, patch_size=14, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return Parts(config, processor, "<image>")


_POINTS = [[SIDE, SIDE], [SIDE, 112], [112, SIDE], [112, 112]]


def _llava_next() -> Parts:
    import transformers as hf

    words = tokenizer([], image_token="<image>")
    config = hf.LlavaNextConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_VIT, "projection_dim": 32},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_POINTS,
        image_seq_length=16,
    )
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": SIDE}, crop_size=_SQUARE, image_grid_pinpoints=_POINTS
    )
    processor = hf.LlavaNextProcessor(
        images, words, patch_size=14, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return Parts(config, processor, "<image>")


def _llava_onevision() -> Parts:
    import transformers as hf

    words = tokenizer([], image_token="<image>", video_token="<video>")
    image, video = words.convert_tokens_to_ids(["<image>", "<video>"])
    config = hf.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_NO_HEAD_DIM}, vision_config=_SIGLIP,
        image_token_index=image, video_token_index=video, image_grid_pinpoints=_POINTS,
        vision_aspect_ratio="anyres_max_9", vision_feature_layer=-1,
    )  # fmt: skip
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_POINTS), words,
        hf.LlavaOnevisionVideoProcessor(size=_SQUARE), num_image_tokens=16,
        vision_feature_select_strategy="full", image_token="<image>", video_token="<video>",
        vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    return Parts(config, processor, "<image>")


def _idefics3(name: str) -> Parts:
    import transformers as hf

    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = tokenizer(
        places,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    config = getattr(hf, f"{name}Config")(
        text_config={"model_type": "llama", **_TEXT}, vision_config=_VIT, scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"), pad_token_id=0,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": SIDE}}
    images = getattr(hf, f"{name}ImageProcessor")(**sizes)
    if name == "Idefics3":
        return Parts(config, hf.Idefics3Processor(images, words, image_seq_len=4), "<image>")
    videos = hf.SmolVLMVideoProcessor(**sizes, fps=1, num_frames=2)
    return Parts(config, hf.SmolVLMProcessor(images, words, videos, image_seq_len=4), "<image>")


def _internvl() -> Parts:
    import transformers as hf

    words = tokenizer(
        [],
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    vision = {**_VIT, "image_size": [SIDE, SIDE], "patch_size": [14, 14]}
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **_NO_HEAD_DIM}, vision_config=vision,
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4,
        downsample_ratio=0.5,
    )  # fmt: skip
    images = hf.GotOcr2ImageProcessor(
        size=_SQUARE, crop_to_patches=False, min_patches=1, max_patches=2
    )
    videos = hf.InternVLVideoProcessor(size=_SQUARE)
    processor = hf.InternVLProcessor(images, words, videos, image_seq_length=4)
    return Parts(config, processor, "<IMG_CONTEXT>")


_GLM = [
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<|video|>",
]  # fmt: skip


def _glm4v(name: str, **text: Any) -> Parts:
    import transformers as hf

    words = tokenizer(_GLM, image_token="<|image|>", video_token="<|video|>")
    names = ("image_start", "image_end", "image", "video_start", "video_end", "video")
    ids = zip(names, words.convert_tokens_to_ids(_GLM), strict=True)
    rope = {**_MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64,
        "num_heads": 2, "image_size": 112, "patch_size": 14, "spatial_merge_size": 2,
    }  # fmt: skip
    base = _TEXT if text else _NO_HEAD_DIM
    config = getattr(hf, f"{name}Config")(
        text_config={**base, "rope_parameters": rope, "partial_rotary_factor": 0.5, **text},
        vision_config=vision,
        **{f"{token}_token_id": number for token, number in ids},
    )
    images, videos = hf.Glm4vImageProcessor(size=_PIXELS), hf.Glm4vVideoProcessor(size=_PIXELS)
    processor = hf.Glm4vProcessor(images, words, videos)
    return Parts(config, processor, "<|begin_of_image|><|image|><|end_of_image|>")


def _llama4() -> Parts:
    import transformers as hf

    tiles = ["<|tile_x_separator|>", "<|tile_y_separator|>"]
    words = tokenizer(["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", *tiles])
    image, start, end = words.convert_tokens_to_ids(
        ["<|patch|>", "<|image_start|>", "<|image_end|>"]
    )
    config = hf.Llama4Config(
        text_config={
            **_TEXT, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
        },
        vision_config={
            **_VIT, "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=image, boi_token_index=start, eoi_token_index=end,
    )  # fmt: skip
    images = hf.Llama4ImageProcessor(size=_SQUARE, max_patches=4)
    processor = hf.Llama4Processor(images, words, patch_size=14, pixel_shuffle_ratio=0.5)
    return Parts(config, processor, "<|image|>")


def _paligemma() -> Parts:
    import transformers as hf

    words = tokenizer(["<image>", "\n"])
    config = hf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_TEXT},
        vision_config={**_SIGLIP, "projection_dim": 64, "num_image_tokens": 16},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        projection_dim=64,
    )
    images = hf.SiglipImageProcessor(size=_SQUARE)
    images.image_seq_length = 16
    return Parts(config, hf.PaliGemmaProcessor(images, words), "<image>")


_GLM_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "use_qk_norm": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Parts]] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Glm4vForConditionalGeneration": lambda: _glm4v("Glm4v"),
    "Glm4vMoeForConditionalGeneration": lambda: _glm4v("Glm4vMoe", **_GLM_MOE),
    "Idefics3ForConditionalGeneration": lambda: _idefics3("Idefics3"),
    "InternVLForConditionalGeneration": _internvl,
    "LightOnOCRForConditionalGeneration": lambda: _mistral3("qwen3"),
    "Llama4ForConditionalGeneration": _llama4,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "LlavaOnevisionForConditionalGeneration": _llava_onevision,
    "Mistral3ForConditionalGeneration": lambda: _mistral3("mistral"),
    "PaliGemmaForConditionalGeneration": _paligemma,
    "Qwen2VLForConditionalGeneration": lambda: _qwen2("2"),
    "Qwen2_5_VLForConditionalGeneration": lambda: _qwen2("2.5"),
    "Qwen3VLForConditionalGeneration": lambda: _qwen3("Qwen3VLConfig"),
    "Qwen3VLMoeForConditionalGeneration": lambda: _qwen3(
        "Qwen3VLMoeConfig", **_MOE, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True
    ),
    "Qwen3_5ForConditionalGeneration": lambda: _qwen3("Qwen3_5Config", **_LINEAR),
    "Qwen3_5MoeForConditionalGeneration": lambda: _qwen3(
        "Qwen3_5MoeConfig", **_LINEAR, **_MOE, shared_expert_intermediate_size=48
    ),
    "SmolVLMForConditionalGeneration": lambda: _idefics3("SmolVLM"),
}
# Published weights of these have an inner name in their tower.
_INNER_NAME = re.compile(
    r"(vision_tower|vision_model)\.(embeddings|encoder|post_layernorm|pre_layrnorm|head)"
)
_EXPERTS = re.compile(r"experts\.(gate_up_proj|down_proj)$")
_WITH_INNER_NAME = ("Gemma3", "Llava", "LlavaOnevision", "PaliGemma", "LlavaNext")


def save(architecture: str, folder: Path) -> str:
    """Write a model with random weights, its processor and its tokenizer; return a text with an
    image's mark.
    """
    import torch
    import transformers as hf
    from safetensors.torch import load_file, save_file

    parts = FAMILIES[architecture]()
    parts.config.architectures = [architecture]
    torch.manual_seed(7)
    model = hf.AutoModelForImageTextToText.from_config(parts.config).float().eval()
    for name, parameter in model.named_parameters():
        if "correction_bias" in name:
            parameter.data.zero_()
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    parts.processor.save_pretrained(folder)
    path = folder / "model.safetensors"
    if architecture == "Qwen3VLMoeForConditionalGeneration":
        # Published ones have the experts' matrices transposed.
        weights = {
            name: value.transpose(1, 2).contiguous() if _EXPERTS.search(name) else value
            for name, value in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    if architecture.removesuffix("ForConditionalGeneration") in _WITH_INNER_NAME:
        weights = {
            _INNER_NAME.sub(r"\1.vision_model.\2", name): value.clone()
            for name, value in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return f"the {parts.mark} is in the hat"
