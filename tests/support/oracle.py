"""The independent reference: transformers with plain hooks that add vectors, no KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from midstream.sites import OUTER, Tap
from support.oracle_edits import BRANCHES, At, EditOracle, Places


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


class Run(NamedTuple):
    """One forward over all the tokens."""

    logits: Tensor  # [T, V]
    values: dict[Tap, Tensor]  # every site's [T, H]


class Oracle(EditOracle):
    """Vectors added at the sites of a layer. `mid` names the module whose input is `resid_mid`."""

    def __init__(
        self,
        path: Path,
        layers: str,
        mid: str | None,
        dtype: torch.dtype = torch.float32,
        branches: Branches | None = None,
    ):
        named: dict[str, Any] = vars(branches) if branches else dict.fromkeys(BRANCHES)
        named = {k: f">{v}" if v and k.endswith("_in") else v for k, v in named.items()}
        places = Places(layers, resid_mid=f">{mid}" if mid else None, **named)
        super().__init__(path, places, dtype=dtype)
        self.sites = tuple(site for site in OUTER if getattr(places, site) is not None)

    def run(self, tokens: Sequence[int], edits: Sequence[HookEdit] = ()) -> Run:
        seen = super().run(tokens, [At(edit, edit.where) for edit in edits])
        return Run(seen.logits, seen.values)

    def taps(self, edit: HookEdit) -> set[Tap]:
        return {(edit.site, edit.layer)}

    def _apply(self, one: At, tap: Tap, h: np.ndarray) -> np.ndarray:
        vector = (one.edit.scale * one.edit.vector.float()).to(self.model.dtype)
        h[[one.where(position) for position in range(len(h))]] += vector.double().numpy()
        return h


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64."""
    a, b = found.double(), expected.double()
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return float((a - b).norm() / b.norm())
