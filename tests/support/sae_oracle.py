"""Random sparse autoencoders as their papers and SAELens define them, in float64: written for the
tests, and independent of `midstream.sae`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

# By name: what `cfg.json` says beyond the common fields.
KINDS: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard", "apply_b_dec_to_input": True},
    "jumprelu": {"architecture": "jumprelu", "apply_b_dec_to_input": False},
    "gated": {"architecture": "gated", "apply_b_dec_to_input": True},
    "topk": {"architecture": "topk", "apply_b_dec_to_input": True, "k": 7},
    "topk of norms": {
        "architecture": "topk",
        "apply_b_dec_to_input": True,
        "k": 5,
        "rescale_acts_by_decoder_norm": True,
    },
    "batchtopk": {"architecture": "batchtopk", "apply_b_dec_to_input": True},
    "transcoder": {"architecture": "transcoder"},
    "skip": {"architecture": "jumprelu_skip_transcoder"},
    "rescaled": {
        "architecture": "standard",
        "apply_b_dec_to_input": True,
        "normalize_activations": "constant_norm_rescale",
    },
    "normed": {
        "architecture": "topk",
        "apply_b_dec_to_input": True,
        "k": 9,
        "normalize_activations": "layer_norm",
    },
    "centered": {
        "architecture": "jumprelu",
        "apply_b_dec_to_input": True,
        "model_from_pretrained_kwargs": {"center_writing_weights": True},
    },
}


class RandomSae:
    """Attributes:
    config: the content of `cfg.json`.
    tensors: float32, by SAELens's names.
    """

    def __init__(self, kind: str, width: int, features: int, hook: str, size: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(sum(kind.encode()) + features)
        self.config = {
            "d_in": width,
            "d_sae": features,
            "hook_name": hook,
            "normalize_activations": "none",
            **KINDS[kind],
        }
        self.kind = kind
        architecture = self.config["architecture"]
        normal = "normalize_activations" in KINDS[kind]
        each = 1.0 if normal else size

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        of_acts = each
        self.tensors = {
            "W_enc": random(width, features) / width**0.5,
            "W_dec": random(features, width) * (0.5 + torch.rand(features, 1, generator=draw)),
            "b_dec": 0.3 * each * random(width),
        }
        if architecture == "gated":
            self.tensors["b_gate"] = of_acts * (random(features) - 0.5)
            self.tensors["b_mag"] = of_acts * random(features)
            self.tensors["r_mag"] = 0.5 * random(features)
        else:
            self.tensors["b_enc"] = 0.5 * of_acts * random(features)
        if architecture.startswith("jumprelu"):
            self.tensors["threshold"] = of_acts * torch.rand(features, generator=draw)
        if architecture == "batchtopk":
            self.tensors["threshold"] = torch.tensor(0.8 * of_acts)
        if "skip" in architecture:
            self.tensors["W_skip"] = random(width, width)

    def write(self, folder: Path) -> Path:
        """Write SAELens's two files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cfg.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "sae_weights.safetensors")
        return folder

    def write_npz(self, path: Path) -> Path:
        """Write Gemma Scope's file."""
        np.savez(path, **{name: tensor.numpy() for name, tensor in self.tensors.items()})
        return path

    def encode(self, x: Tensor) -> Tensor:
        """Activations of all features, float64 [n, features]."""
        w = {name: tensor.double() for name, tensor in self.tensors.items()}
        x = x.double()
        if "model_from_pretrained_kwargs" in self.config:
            x = x - x.mean(-1, keepdim=True)
        match self.config["normalize_activations"]:
            case "constant_norm_rescale":
                x = x / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5
            case "layer_norm":
                deviation = ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1, keepdim=True)
                deviation = (deviation / (x.shape[-1] - 1)).sqrt()
                x = (x - x.mean(-1, keepdim=True)) / (deviation + 1e-5)
        if self.config.get("apply_b_dec_to_input"):
            x = x - w["b_dec"]
        before = x @ w["W_enc"]
        if self.config["architecture"] == "gated":
            is_open = before + w["b_gate"] > 0
            magnitude = (x @ (w["W_enc"] * torch.exp(w["r_mag"])) + w["b_mag"]).clamp(min=0)
            return is_open * magnitude
        before = before + w["b_enc"]
        if self.config.get("rescale_acts_by_decoder_norm"):
            before = before * w["W_dec"].norm(dim=-1)
        if "k" in self.config:
            lowest = before.sort(-1, descending=True).values[:, self.config["k"] - 1, None]
            return torch.where(before >= lowest, before, 0).clamp(min=0)
        if "threshold" in w:
            return torch.where(before > w["threshold"], before, 0).clamp(min=0)
        return before.clamp(min=0)

    def decode(self, active: Tensor) -> Tensor:
        """What the activations of an SAE stand for, float64 [n, width]."""
        rows = self.tensors["W_dec"].double()
        if self.config.get("rescale_acts_by_decoder_norm"):
            rows = rows / rows.norm(dim=-1, keepdim=True)
        return active.double() @ rows + self.tensors["b_dec"].double()
