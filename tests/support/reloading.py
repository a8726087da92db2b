"""Models of one shape with other weights, which an engine loads in place of its own."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def other_weights(model: Path, target: Path, seed: int) -> Path:
    """Saves the model with each weight changed by a tenth of its size or so."""
    if not (target / "config.json").exists():
        changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in changed.parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                parameter += 0.3 * parameter.std() * noise
        changed.save_pretrained(target)
    return target


def reload(llm: Any, model: Path) -> None:
    """Loads the weights of a folder, by vLLM's own way; the prefix cache is not reset."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel does not say how much memory is in use")
