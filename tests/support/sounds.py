"""A tiny random model of sounds, and what transformers computes of its prompts."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from support import vision
from support.tokenizers import byte_pairs

RATE = 16000
MARK, HOLDS = "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|AUDIO|>"


def _qwen2audio() -> vision.Parts:
    tokenizer = byte_pairs(
        vision.CHAT,
        audio_token=HOLDS,
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
    )
    text = {name: value for name, value in vision.TEXT.items() if name != "head_dim"}
    config = hf.Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
        },
        text_config={**text, "model_type": "qwen2"},
        audio_token_index=tokenizer.convert_tokens_to_ids(HOLDS),
    )
    processor = hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=16), tokenizer)
    return vision.Parts("Qwen2AudioForConditionalGeneration", config, processor)


MODEL = vision.Vision(_qwen2audio, MARK, HOLDS)


def make(folder: Path) -> Path:
    """Write the model as `vision.make` does."""
    return vision.make("qwen2audio", folder, MODEL)


def sound(seed: int, seconds: float = 0.4) -> np.ndarray:
    """Return noise of 16-bit numbers, float32 [samples], which a WAV file holds exactly."""
    numbers = np.random.default_rng(seed).integers(-9000, 9000, int(seconds * RATE))
    return (numbers / 32768).astype(np.float32)


def wav(samples: np.ndarray) -> str:
    """Return a WAV file of a sound in base64."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32768).astype("<i2").tobytes())
    return base64.b64encode(data.getvalue()).decode()


class SoundOracle(vision.VisionOracle):
    """transformers with hooks."""

    def __init__(self, path: Path) -> None:
        super().__init__("qwen2audio", path, MODEL)

    def processed(self, text: str, media: Sequence[Any]) -> dict[str, Any]:
        given = {"audio": list(media), "sampling_rate": RATE} if media else {}
        return dict(self._processor(text=[text], return_tensors="pt", **given))

    @torch.no_grad()
    def tower(self, samples: np.ndarray) -> torch.Tensor:
        """Return the embeddings of a sound [tokens, hidden], as the projector gave them."""
        given: list[torch.Tensor] = []
        projector = self._model.model.multi_modal_projector
        handle = projector.register_forward_hook(lambda _m, _a, output: given.append(output))
        inputs = self.inputs(MARK, [samples])
        try:
            self._model(**inputs, use_cache=False)
        finally:
            handle.remove()
        return given[0][0, : len(self.media_tokens(inputs))]
