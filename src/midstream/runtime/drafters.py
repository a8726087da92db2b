"""The model that drafts tokens, where there is one: it must not run what is tapped."""

from __future__ import annotations

from typing import Any

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.taps import TappedLayer, TappedModule


def check_drafter(runner: Any) -> None:
    """Refuses a drafter that shares tapped modules with the model: its forward would fire them.
    Embeddings, the head and rotary tables, which many share, have no taps.

    Args:
        runner: vLLM's model runner, whose model is tapped.

    Raises:
        UnsupportedError: names the module.
    """
    drafter = _drafter(runner)
    if drafter is None:
        return
    for name, module in drafter.named_modules():
        if isinstance(module, TappedLayer | TappedModule):
            raise UnsupportedError(
                f"the drafter of speculative_config, a {type(drafter).__name__}, shares its {name} "
                "with the model: what it drafts would be captured and edited too"
            )


def _drafter(runner: Any) -> nn.Module | None:
    """The drafter's model; n-grams have none."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        unwrap = getattr(model, "unwrap", None)
        if callable(unwrap) and not isinstance(model, nn.Module):
            model = unwrap()  # of the graphs that replay it
        if isinstance(model, nn.Module):
            return model
    return None
