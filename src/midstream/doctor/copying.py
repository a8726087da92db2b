"""A small random copy of a model, saved as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from midstream.doctor.shrink import Size, shrink

# So large that attention, MLP and each layer matter; biases and norms differ from 0 and 1.
WEIGHTS, OTHERS = 0.15, 0.1


def small_config(config: Any, size: Size) -> Any:
    """The small configuration, of the language model's own class.

    Args:
        config: a transformers configuration; of one with several parts the language model's.
        size: how small.

    Raises:
        ValueError: the fields do not say what is needed, or do not fit each other.
    """
    text = config.get_text_config(decoder=True)
    fields = shrink(text.to_dict(), size)
    return type(text).from_dict(fields)


def save_copy(config: Any, folder: Path, seed: int, architecture: str | None = None) -> None:
    """Makes a model of this configuration with random weights and saves it.

    Args:
        config: a small one.
        folder: is made.
        seed: of the weights.
        architecture: name under which vLLM is to load it; None: that of transformers' class.

    Raises:
        ValueError: transformers has no language model of this kind.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "correction_bias" in name:
            # vLLM's CPU build leaves it out of some routers' sums: as in a new model, it is 0.
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
