"""The reference for patches: transformers with plain hooks, each cell a row of the batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Tap = tuple[str, int]
# The module of a layer whose input (">") or output a site is; "" is the layer itself.
PLACES = {
    "resid_pre": ">",
    "resid_post": "",
    "resid_mid": ">post_attention_layernorm",
    "attn_out": "self_attn",
    "mlp_out": "mlp",
    "z": ">self_attn.o_proj",
}
_AT_ONCE = 24


@dataclass(frozen=True)
class Patch:
    """One cell.

    Attributes:
        tap: its site and layer.
        change: changes [tokens, width] in place.
    """

    tap: Tap
    change: Callable[[Tensor], None]


def put(positions: Sequence[int], rows: Tensor, columns: slice = slice(None), alpha: float = 1.0):
    """A change: h ← (1 − alpha) · h + alpha · row, in some columns."""

    def change(hidden: Tensor) -> None:
        for position, row in zip(positions, rows, strict=True):
            h = hidden[position, columns]
            h += alpha * (row[columns] - h)

    return change


class PatchOracle:
    """Patches of one prompt."""

    def __init__(self, path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.eval()
        self.layers = self.model.model.layers
        self.heads = int(model.config.num_attention_heads)

    def rows(self, tokens: Sequence[int], taps: Iterable[Tap]) -> dict[Tap, Tensor]:
        """[tokens, width] of each tap, unpatched."""
        seen: dict[Tap, Tensor] = {}

        def keep(tap: Tap) -> Callable[[Tensor], None]:
            def change(hidden: Tensor) -> None:
                seen[tap] = hidden.clone()

            return change

        for tap in taps:
            self.logprobs(tokens, [Patch(tap, keep(tap))])
        return seen

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], patches: Sequence[Patch] = ()) -> Tensor:
        """ln P of the token after the prompt, [patches, vocabulary]; [1, …] without patches."""
        if not patches:
            return self._run(tokens, 1, [])
        parts = [patches[nth : nth + _AT_ONCE] for nth in range(0, len(patches), _AT_ONCE)]
        return torch.cat([self._run(tokens, len(part), part) for part in parts])

    def _run(self, tokens: Sequence[int], count: int, patches: Sequence[Patch]) -> Tensor:
        handles = [self._hook(nth, patch) for nth, patch in enumerate(patches)]
        try:
            ids = torch.tensor([list(tokens)] * count)
            logits = self.model(ids, use_cache=False).logits[:, -1]
        finally:
            for handle in handles:
                handle.remove()
        return logits.float().log_softmax(-1)

    def _hook(self, row: int, patch: Patch) -> Any:
        site, layer = patch.tap
        place = PLACES[site]
        module: Any = self.layers[layer]
        for name in filter(None, place.removeprefix(">").split(".")):
            module = getattr(module, name)

        def before(_module: Any, args: tuple, kwargs: dict) -> None:
            # In place: what the layer keeps for its skip connection is the same tensor.
            patch.change((args[0] if args else kwargs["hidden_states"])[row])

        def after(_module: Any, _args: tuple, out: Any) -> None:
            patch.change((out[0] if isinstance(out, tuple) else out)[row])

        if place.startswith(">"):
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)
