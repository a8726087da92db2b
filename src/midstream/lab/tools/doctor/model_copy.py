"""Small random copy of a model, saved in transformers' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from midstream.lab.tools.doctor.small_config import Size, shrink

# Large enough that attention, MLP and every layer change the output; biases differ from 0 and norm
# weights from 1.
WEIGHTS, OTHERS = 0.15, 0.1


def small_config(config: Any, size: Size) -> Any:
    """Return a small configuration of the language model's own class.

    Args:
        config: transformers configuration; of a multimodal one, the language model's part is used.
    """
    text = config.get_text_config(decoder=True)
    fields = shrink(text.to_dict(), size)
    return type(text).from_dict(fields)


def save_copy(config: Any, folder: Path, seed: int, architecture: str | None = None) -> None:
    """Save a model of this configuration with random weights.

    Args:
        folder: created if missing.
        architecture: architecture name for vLLM to load; None: the name of transformers' class.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "correction_bias" in name:
            # vLLM's CPU build ignores this bias in some routers, so it keeps its initial value 0.
            parameter.data.zero_()
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=WEIGHTS)
        else:
            parameter.data += OTHERS * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if architecture is not None:
        path = folder / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["architectures"] = [architecture]
        path.write_text(json.dumps(fields, indent=2), encoding="utf-8")
