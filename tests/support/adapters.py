"""LoRA adapters for the tiny models, and the merged models."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RANK = 4
ALPHA = 8.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"


def make(model: Path, target: Path, seed: int, head: bool = False) -> Path:
    """Saves an adapter of every projection of a tiny Llama, and of its head if asked for, in PEFT's
    layout; large enough to matter at every site.
    """
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    targets = (*TARGETS, HEAD) if head else TARGETS
    for name, weight in _projections(AutoModelForCausalLM.from_pretrained(model), targets).items():
        out, width = weight.shape
        key = f"base_model.model.{name}"
        weights[f"{key}.lora_A.weight"] = 0.2 * torch.randn(RANK, width, generator=draw)
        weights[f"{key}.lora_B.weight"] = 0.2 * torch.randn(out, RANK, generator=draw)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def merge(model: Path, adapter: Path, target: Path) -> Path:
    """Saves the model with W + (alpha / r) · B·A in the place of each W."""
    from safetensors.torch import load_file

    weights = load_file(adapter / "adapter_model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in _projections(merged, (*TARGETS, HEAD)).items():
            key = f"base_model.model.{name}"
            if f"{key}.lora_A.weight" not in weights:
                continue
            a, b = weights[f"{key}.lora_A.weight"], weights[f"{key}.lora_B.weight"]
            weight += (ALPHA / RANK) * (b @ a)
    merged.save_pretrained(target)
    return target


def _projections(model: torch.nn.Module, targets: tuple[str, ...]) -> dict[str, torch.nn.Parameter]:
    return {
        name: module.weight
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in targets
    }
