"""Gradients in transformers by `retain_grad` alone: the reference for those of a twin."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from midstream.sites import Tap
from support.oracle import Branches


def difference(logits: Tensor) -> Tensor:
    """A metric of two tokens of the last position."""
    return logits[-1, 7] - logits[-1, 11]


class GradientOracle:
    """A transformers model whose every value is kept for one backward pass.

    `mid` names the module whose input is `resid_mid`, `mlp_in` of the branches the module whose
    input the MLP reads.
    """

    def __init__(
        self, path: Path, layers: str, mid: str | None, branches: Branches, **sites: str
    ) -> None:
        """`sites`: further sites, by name the module whose input they are."""
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layers: list[nn.Module] = list(self.model.get_submodule(layers))
        inputs = {"attn_in": branches.attn_in, "mlp_in": branches.mlp_in, **sites}
        self._inputs = inputs | ({"resid_mid": mid} if mid else {})
        self._outputs = {"attn_out": branches.attn_out, "mlp_out": branches.mlp_out}

    def run(
        self, tokens: Sequence[int], metric: Callable[[Tensor], Tensor]
    ) -> tuple[float, dict[Tap, Tensor], dict[Tap, Tensor]]:
        """(the metric, the values, the gradients) of one pass, the latter two [T, W] by tap."""
        seen: dict[Tap, Tensor] = {}

        def keep(tap: Tap, value: Tensor) -> None:
            value.retain_grad()
            seen[tap] = value

        def before(tap: Tap) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                given = args[0] if args else kwargs["hidden_states"]
                if tap[0].startswith("resid"):
                    keep(tap, given)
                    return None
                # Other modules may read this tensor as well.
                copy = given * 1
                keep(tap, copy)
                return (
                    ((copy, *args[1:]), kwargs)
                    if args
                    else (args, kwargs | {"hidden_states": copy})
                )

            return hook

        def after(tap: Tap) -> Callable[..., None]:
            return lambda _, args, out: keep(tap, out[0] if isinstance(out, tuple) else out)

        handles = []
        for index, layer in enumerate(self.layers):
            for site, path in {"resid_pre": "", **self._inputs}.items():
                module = layer.get_submodule(path)
                handles.append(
                    module.register_forward_pre_hook(before((site, index)), with_kwargs=True)
                )
            for site, path in {"resid_post": "", **self._outputs}.items():
                module = layer.get_submodule(path)
                handles.append(module.register_forward_hook(after((site, index))))
        try:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
            value = metric(logits)
            value.backward()
        finally:
            for handle in handles:
                handle.remove()
        width = {tap: each.shape[-1] for tap, each in seen.items()}
        return (
            float(value.detach()),
            {tap: each.detach().reshape(-1, width[tap]) for tap, each in seen.items()},
            {tap: each.grad.reshape(-1, width[tap]) for tap, each in seen.items()},
        )
