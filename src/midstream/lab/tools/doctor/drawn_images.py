"""Images for any multimodal class of vLLM: tokens in the prompt whose embeddings are drawn.

A processor needs files that a configuration does not have. Here vLLM's class gets one that takes
the place of an image from the token ids, and embeddings drawn at random in place of those of its
tower. All else is vLLM's own: where embeddings go, their rotary positions, what layers get of them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

DRAWN, PROCESSED = "an image's drawn embeddings", "an image through the class's tower"
SOUND = "a sound's drawn embeddings"
# Arguments of an engine that gets one image.
IMAGE_SETTINGS: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 1, "audio": 1, "video": 0},
    "mm_processor_cache_gb": 0,
    "skip_mm_profiling": True,
}
# Token id of an image in a small copy, which no random prompt has, and the number of its tokens.
TOKEN, LENGTH = 3, 4
# As the embeddings of tokens in a small copy.
STD = 0.15
_SEED = 7
_FIELD = "midstream_drawn"


@contextmanager
def drawn_images(folder: str) -> Iterator[None]:
    """Let the class of a folder's configuration take drawn images."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    model_class = ModelRegistry.models[architecture].load_model_cls()
    info, dummies, processor = _parts(_modality_of(model_class))
    # Some classes only choose another one of their module.
    others = [
        other
        for other in vars(sys.modules[model_class.__module__]).values()
        if isinstance(other, type) and "embed_multimodal" in vars(other)
        if not getattr(other, "_is_protocol", False)
    ]
    changed = [(model_class, "_processor_factory")]
    changed += [(other, "embed_multimodal") for other in dict.fromkeys([model_class, *others])]
    before = [(owner, name, vars(owner).get(name)) for owner, name in changed]
    if vars(model_class).get("_processor_factory") is not None:
        delattr(model_class, "_processor_factory")
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummies)(model_class)
    for owner, name in changed[1:]:
        setattr(owner, name, _embed)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def image_requests(llm: Any, images: str, text: str, seed: int) -> list[dict[str, Any]]:
    """Return the engine's prompts with an image: DRAWN, PROCESSED in a text, or none."""
    if images == PROCESSED:
        return [{"prompt": text, "multi_modal_data": {"image": picture(seed)}}]
    if images != DRAWN:
        return []
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(TOKEN + 1, 100, (2, 9), generator=draw).tolist()
    (modality,) = llm.llm_engine.renderer.mm_processor.info.supported_mm_limits
    item: Any = Image.new("RGB", (8, 8)) if modality == "image" else (np.zeros(160), 16000)
    tokens = [*words[0], *[TOKEN] * LENGTH, *words[1]]
    return [{"prompt_token_ids": tokens, "multi_modal_data": {modality: item}}]


def shown(llm: Any, images: str) -> str:
    """Return what was in the prompts: SOUND for DRAWN of a class that takes no images."""
    if images != DRAWN:
        return images
    return (
        DRAWN if "image" in llm.llm_engine.renderer.mm_processor.info.supported_mm_limits else SOUND
    )


def picture(seed: int) -> Image.Image:
    """Return a random picture."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (84, 70, 3), generator=draw, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def _modality_of(model_class: Any) -> str:
    """Return "audio" for a class that has a placeholder for sounds and none for images, or that
    transcribes.
    """
    for modality in ("image", "audio"):
        try:
            if model_class.get_placeholder_str(modality, 1) is not None:
                return modality
        except (ValueError, NotImplementedError):
            continue
    return "audio" if getattr(model_class, "supports_transcription", False) else "image"


def _embed(self: Any, **inputs: Any) -> list[torch.Tensor]:
    """Return drawn embeddings [T, H] of each item; wider ones where layers get some too."""
    sample = next(parameter for parameter in self.parameters() if parameter.is_floating_point())
    config = self.config.get_text_config()
    width = int(config.hidden_size) * max(1, len(getattr(self, "_ds_buffers", ())))
    width += int(getattr(self, "multiscale_dim", 0))
    draw = torch.Generator().manual_seed(_SEED)
    rows = STD * torch.randn(LENGTH, width, generator=draw)
    return [rows.to(sample.device, sample.dtype) for _ in inputs[_FIELD]]


def _parts(modality: str) -> tuple[Any, Any, Any]:
    """Return classes of a processing info, a builder of dummy inputs, and a processor."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseMultiModalProcessor,
        BaseProcessingInfo,
    )

    numbers = itertools.count()

    class DrawnInfo(BaseProcessingInfo):  # type: ignore[misc]
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {modality: 1}

        def get_mm_max_tokens_per_item(self, *_: Any, **__: Any) -> Mapping[str, int]:
            return {modality: LENGTH}

        def get_data_parser(self) -> Any:
            from vllm.multimodal.parse import MultiModalDataParser

            return MultiModalDataParser(target_sr=16000)

    class DrawnDummies(BaseDummyInputsBuilder):  # type: ignore[misc]
        def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
            return ""

        def get_dummy_mm_data(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

    class DrawnProcessor(BaseMultiModalProcessor):  # type: ignore[misc]
        requires_tokenizer = False

        def _get_mm_fields_config(self, *_: Any) -> dict[str, Any]:
            return {}

        def _get_prompt_updates(self, *_: Any) -> list[Any]:
            return []

        def apply(self, inputs: Any, *_: Any) -> Any:
            tokens = list(inputs.prompt)
            data = {_FIELD: torch.zeros(1), **_grids(self.info.get_hf_config())}
            item = MultiModalKwargsItem(
                {
                    name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
                    for name, value in data.items()
                }
            )
            return mm_input(
                prompt_token_ids=tokens,
                mm_kwargs=MultiModalKwargsItems({modality: [item]}),
                # An image of its own for each request, so that each runs the class's encoder.
                mm_hashes={modality: [f"{_FIELD}-{next(numbers)}"]},
                mm_placeholders={modality: [PlaceholderRange(tokens.index(TOKEN), LENGTH)]},
            )

    return DrawnInfo, DrawnDummies, DrawnProcessor


def _grids(config: Any) -> dict[str, torch.Tensor]:
    """Return the fields that rotary positions are made of: two by two merged patches."""
    vision = getattr(config, "vision_config", None)
    merge = next(
        (
            int(getattr(place, name))
            for name in ("spatial_merge_size", "merge_size")
            for place in (vision, config)
            if isinstance(getattr(place, name, None), int)
        ),
        2,
    )
    grid = torch.tensor([1, 2 * merge, 2 * merge])
    return {"image_grid_thw": grid, "audio_feature_length": torch.tensor(LENGTH)}
