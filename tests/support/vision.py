"""Tiny random vision-language models, and what transformers computes of their prompts."""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from PIL import Image as Pictures
from safetensors.torch import load_file, save_file

from support.tokenizers import byte_pairs

VOCAB, HIDDEN, LAYERS = 400, 64, 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}"
    "MARK{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = ["<|im_start|>", "<|im_end|>"]
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {
    "rope_type": "default",
    "mrope_section": [4, 6, 6],
    "mrope_interleaved": True,
    "rope_theta": 10000.0,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}


class Parts(NamedTuple):
    """A model's class in transformers, its configuration and its processor."""

    name: str
    config: Any
    processor: Any


@dataclass(frozen=True)
class Vision:
    """An architecture; `mark` is an image in a text, `holds` the token that its embeddings replace,
    `token_types` the input by which transformers lets the tokens of an image attend both ways.
    """

    make: Callable[[], Parts]
    mark: str
    holds: str
    token_types: str | None = None


def _qwen3vl() -> Parts:
    names = ["vision_start", "vision_end", "image_pad", "video_pad"]
    start, end, image, video = (f"<|{name}|>" for name in names)
    tokenizer = byte_pairs(
        [*CHAT, start, end, image, video],
        image_token=image,
        video_token=video,
        vision_bos_token=start,
        vision_eos_token=end,
    )
    start_id, end_id, image_id, video_id = tokenizer.convert_tokens_to_ids(
        [start, end, image, video]
    )
    config = hf.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": _ROPE, "rope_scaling": _ROPE},
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        image_token_id=image_id,
        video_token_id=video_id,
        vision_start_token_id=start_id,
        vision_end_token_id=end_id,
    )
    sizes = {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}}
    sizes |= {"patch_size": 16, "merge_size": 2}
    # As in published ones. vLLM normalises videos with the mean and deviation of images.
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images, videos = hf.Qwen2VLImageProcessor(**sizes), hf.Qwen3VLVideoProcessor(**sizes)
    processor = hf.Qwen3VLProcessor(images, tokenizer, videos)
    return Parts("Qwen3VLForConditionalGeneration", config, processor)


def _gemma3(tokens: int = 4) -> Parts:
    # A line break before or after an image is one token with those that its processor writes.
    start, end, image = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    breaks = ["\n" * count for count in range(1, 5)]
    tokenizer = byte_pairs(
        [*CHAT, start, end, image, *breaks], image_token=image, boi_token=start, eoi_token=end
    )
    start_id, end_id, image_id = tokenizer.convert_tokens_to_ids([start, end, image])
    kinds = ["sliding_attention", "full_attention"] * 2
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **TEXT, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32
        ),
        vision_config=hf.SiglipVisionConfig(**_SIGLIP),
        mm_tokens_per_image=tokens,
        image_token_index=image_id,
        boi_token_index=start_id,
        eoi_token_index=end_id,
    )
    images = hf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = hf.Gemma3Processor(images, tokenizer, image_seq_length=tokens)
    return Parts("Gemma3ForConditionalGeneration", config, processor)


MODELS = {
    "qwen3vl": Vision(_qwen3vl, "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
    "gemma3": Vision(_gemma3, "<start_of_image>", "<image_soft_token>", "token_type_ids"),
}
# Gemma 3 with images of 16 tokens.
LARGE_IMAGES = Vision(
    lambda: _gemma3(16), "<start_of_image>", "<image_soft_token>", "token_type_ids"
)


def make(name: str, folder: Path, vision: Vision | None = None) -> Path:
    """Write a model, or another one by its name, for transformers and, beside it with `-served`,
    with the names of weights that published ones have; return the path of the first.
    """
    path = folder / f"vision-{name}"  # `tiny` has language models of the same names
    if (path / "config.json").exists():
        return path
    vision = vision or MODELS[name]
    parts = vision.make()
    parts.processor.tokenizer.chat_template = CHATML.replace("MARK", vision.mark)
    parts.processor.chat_template = parts.processor.tokenizer.chat_template
    parts.config.architectures = [parts.name]
    torch.manual_seed(7)
    model = getattr(hf, parts.name)(parts.config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for place in (path, served(path)):
        model.save_pretrained(place)
        parts.processor.save_pretrained(place)
    weights = load_file(served(path) / "model.safetensors")
    renamed = {_published(key): value.clone() for key, value in weights.items()}
    save_file(renamed, served(path) / "model.safetensors", metadata={"format": "pt"})
    return path


def served(path: Path) -> Path:
    return path.with_name(f"{path.name}-served")


def _published(name: str) -> str:
    name = re.sub(
        r"(vision_tower)\.(embeddings|encoder|post_layernorm)", r"\1.vision_model.\2", name
    )
    return name.replace("language_model.model.model.", "language_model.model.")  # of Qwen2-Audio


def picture(seed: int, width: int = 70, height: int = 84) -> Pictures.Image:
    numbers = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Pictures.fromarray(numbers)


def url_part(seed: int) -> dict[str, Any]:
    """The part of a message that is a picture."""
    data = io.BytesIO()
    picture(seed).save(data, "PNG")
    text = base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


class VisionOracle:
    """transformers with hooks."""

    def __init__(self, name: str, path: Path, vision: Vision | None = None) -> None:
        self._vision = vision or MODELS[name]
        self._processor = hf.AutoProcessor.from_pretrained(path)
        model_class = getattr(hf, self._vision.make().name)
        self._model = model_class.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._layers = self._model.model.language_model.layers

    def inputs(self, text: str, media: Sequence[Any], more: Sequence[int] = ()) -> dict[str, Any]:
        """Return the inputs for a text with media, and more tokens behind it."""
        return self.continued(self.processed(text, media), more)

    def with_video(
        self, text: str, media: Sequence[Any], frames: Any, about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the inputs for a text with images and a video, all of whose frames are read."""
        return self.continued(
            dict(
                self._processor(
                    text=[text],
                    images=[list(media)],
                    videos=[frames],
                    video_metadata=[dict(about)],
                    do_sample_frames=False,
                    return_tensors="pt",
                )
            ),
            (),
        )

    def continued(self, inputs: dict[str, Any], more: Sequence[int]) -> dict[str, Any]:
        """Return what the processor made, with more tokens behind it."""
        tail = torch.tensor([list(more)], dtype=torch.long)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tail], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for types in ("token_type_ids", "mm_token_type_ids"):
            if types in inputs:
                inputs[types] = torch.cat([inputs[types], torch.zeros_like(tail)], 1)
        if self._vision.token_types is not None and not torch.cuda.is_available():
            # vLLM's attention on a CPU is causal among the tokens of an image, too.
            inputs[self._vision.token_types] = torch.zeros_like(inputs["input_ids"])
        return inputs

    def processed(self, text: str, media: Sequence[Any]) -> dict[str, Any]:
        """Return what the model's processor makes of a text with media."""
        return dict(self._processor(text=[text], images=[list(media)], return_tensors="pt"))

    def media_tokens(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the positions whose embeddings are those of media."""
        holds = self._processor.tokenizer.convert_tokens_to_ids(self._vision.holds)
        return torch.nonzero(inputs["input_ids"][0] == holds).flatten().tolist()

    @torch.no_grad()
    def run(
        self, inputs: Mapping[str, Any], layer: int = 0, added: Mapping[int, Any] | None = None
    ) -> tuple[dict[tuple[str, int], torch.Tensor], torch.Tensor]:
        """Return the rows that each layer takes and gives, and the logits; `added` are vectors that
        are added to the output of a layer, by position.
        """
        rows: dict[tuple[str, int], torch.Tensor] = {}

        def before(index: int) -> Callable[..., None]:
            def hook(_module: Any, args: Any, named: Any) -> None:
                rows["resid_pre", index] = (args[0] if args else named["hidden_states"])[0].clone()

            return hook

        def after(index: int) -> Callable[..., Any]:
            def hook(_module: Any, _args: Any, _named: Any, output: Any) -> Any:
                stream = output[0] if isinstance(output, tuple) else output
                stream = stream.clone()
                if index == layer:
                    for position, vector in (added or {}).items():
                        stream[0, position] += vector
                rows["resid_post", index] = stream[0].clone()
                return (stream, *output[1:]) if isinstance(output, tuple) else stream

            return hook

        handles = []
        for index, module in enumerate(self._layers):
            handles.append(module.register_forward_pre_hook(before(index), with_kwargs=True))
            handles.append(module.register_forward_hook(after(index), with_kwargs=True))
        try:
            logits = self._model(**inputs, use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return rows, logits
