"""The independent reference: transformers in float32 with plain PyTorch hooks, no KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from midstream.sites import OUTER, Tap


@dataclass(frozen=True)
class HookEdit:
    """h ← h + scale · vector at one site of one layer, at the positions for which `where` holds."""

    site: str
    layer: int
    vector: Tensor
    scale: float
    where: Callable[[int], bool]


@dataclass(frozen=True)
class Branches:
    """The modules of transformers' layer at which the branches are."""

    attn_in: str = "self_attn"  # whose input attention reads
    attn_out: str = "self_attn"  # whose output attention adds to the stream
    mlp_in: str = "mlp"  # whose input the MLP reads
    mlp_out: str = "mlp"  # whose output the MLP adds to the stream


class Oracle:
    """Hooks on a transformers model. `mid` names the module whose input is `resid_mid`."""

    def __init__(
        self,
        path: Path,
        layers: str,
        mid: str | None,
        dtype: torch.dtype = torch.float32,
        branches: Branches | None = None,
    ):
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager"
        ).eval()
        found: nn.Module = self.model
        for name in layers.split("."):
            found = getattr(found, name)
        self.layers = list(found.children())
        self.mid = mid
        self.branches = branches
        lacking = set() if mid else {"resid_mid"}
        if branches is None:
            lacking |= {"attn_in", "attn_out", "mlp_in", "mlp_out"}
        self.sites = tuple(site for site in OUTER if site not in lacking)

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], edits: Sequence[HookEdit] = ()
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """(logits [T, V], every site's [T, H]) of one forward over all the tokens."""
        seen: dict[Tap, Tensor] = {}
        handles = []
        for index, layer in enumerate(self.layers):
            handles.append(
                layer.register_forward_pre_hook(
                    self._before("resid_pre", index, edits, seen), with_kwargs=True
                )
            )
            if self.mid:
                handles.append(
                    _module(layer, self.mid).register_forward_pre_hook(
                        self._before("resid_mid", index, edits, seen), with_kwargs=True
                    )
                )
            if self.branches:
                for site, place in vars(self.branches).items():
                    module = _module(layer, place)
                    if site.endswith("_in"):
                        hook = self._read(site, index, edits, seen)
                        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                    else:
                        hook = self._branch(site, index, edits, seen)
                        handles.append(module.register_forward_hook(hook))
            handles.append(
                layer.register_forward_hook(self._after("resid_post", index, edits, seen))
            )
        try:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return logits.float(), seen

    def generate(
        self, prompt: Sequence[int], max_tokens: int, edits: Sequence[HookEdit] = ()
    ) -> list[int]:
        """Greedy tokens, the whole sequence computed anew for each."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            logits, _ = self.run(tokens, edits)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]

    def _before(self, site: str, layer: int, edits: Sequence[HookEdit], seen: dict[Tap, Tensor]):
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            # In place: what the layer keeps for its skip connection is the same tensor.
            _edit(hidden, site, layer, edits)
            seen[site, layer] = hidden.reshape(-1, hidden.shape[-1]).clone()

        return hook

    def _after(self, site: str, layer: int, edits: Sequence[HookEdit], seen: dict[Tap, Tensor]):
        def hook(_module: nn.Module, _args: tuple, out: object) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            _edit(hidden, site, layer, edits)
            seen[site, layer] = hidden.reshape(-1, hidden.shape[-1]).clone()

        return hook

    def _read(self, site: str, layer: int, edits: Sequence[HookEdit], seen: dict[Tap, Tensor]):
        """A hook on a module's input that puts an edited copy in its place."""

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            found = args[0] if args else kwargs["hidden_states"]
            hidden = _edited_copy(found, site, layer, edits, seen)
            return (
                ((hidden, *args[1:]), kwargs)
                if args
                else (args, {**kwargs, "hidden_states": hidden})
            )

        return hook

    def _branch(self, site: str, layer: int, edits: Sequence[HookEdit], seen: dict[Tap, Tensor]):
        """A hook on a module's output that puts an edited copy in its place."""

        def hook(_module: nn.Module, _args: tuple, out: object) -> object:
            hidden = out[0] if isinstance(out, tuple) else out
            hidden = _edited_copy(hidden, site, layer, edits, seen)
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        return hook


def _module(layer: nn.Module, path: str) -> nn.Module:
    for name in path.split("."):
        layer = getattr(layer, name)
    return layer


def _edited_copy(
    hidden: Tensor, site: str, layer: int, edits: Sequence[HookEdit], seen: dict[Tap, Tensor]
) -> Tensor:
    hidden = hidden.clone(memory_format=torch.contiguous_format)
    _edit(hidden, site, layer, edits)
    seen[site, layer] = hidden.reshape(-1, hidden.shape[-1]).clone()
    return hidden


def _edit(hidden: Tensor, site: str, layer: int, edits: Sequence[HookEdit]) -> None:
    rows = hidden.view(-1, hidden.shape[-1])
    for edit in edits:
        if (edit.site, edit.layer) == (site, layer):
            chosen = [p for p in range(rows.shape[0]) if edit.where(p)]
            rows[chosen] += (edit.scale * edit.vector.float()).to(rows.dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64."""
    a, b = found.double(), expected.double()
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return float((a - b).norm() / b.norm())
