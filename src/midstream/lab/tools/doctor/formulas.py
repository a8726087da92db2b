"""Reference formulas of the operations, in float64, from their definitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from midstream.plan import (
    Ablate,
    Affine,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Replace,
    Scale,
    Steer,
    Vector,
)


def apply(edit: Any, hidden: Tensor, heads: int = 0) -> Tensor:
    """Return the edited vectors.

    Args:
        edit: edit with vectors by value; a Gate must read at the tap of its edit, and be of all
            heads and components.
        hidden: [T, H], the tokens that the edit applies to.
        heads: number of heads that these are of; 0: none.

    Returns:
        float64 [T, H].
    """
    h: Tensor = hidden.double()
    dims: tuple[int, ...] = getattr(edit, "dims", ())
    if dims or getattr(edit, "heads", ()):
        return _in_parts(edit, h, heads, list(dims))
    return _whole(edit, h)


def _in_parts(edit: Any, h: Tensor, heads: int, dims: list[int]) -> Tensor:
    """Return vectors of which only some heads, or components of these, are edited."""
    changed = h.clone()
    for part in columns(edit, h.shape[1], heads):
        new = _whole(edit, h[:, part])
        chosen = dims or list(range(new.shape[1]))
        changed[:, torch.arange(h.shape[1])[part][chosen]] = new[:, chosen]
    return changed


def columns(edit: Any, width: int, heads: int) -> list[slice]:
    """Return the columns of the heads that an edit or a probe names; all for none."""
    size = width // heads if edit.heads else width
    return [slice(head * size, (head + 1) * size) for head in edit.heads or (0,)]


def _whole(edit: Any, h: Tensor) -> Tensor:
    if not isinstance(edit, Gate):
        return h + _added(edit, h)
    score = h @ _row(edit.probe.direction) + edit.probe.bias
    over = (score - edit.threshold)[:, None]
    g = (over > 0).double() if edit.sharpness is None else torch.sigmoid(edit.sharpness * over)
    return h + g * _added(edit.edit, h)


def score(probe: Any, hidden: Tensor, heads: int = 0) -> Tensor:
    """Return ⟨h, direction⟩ + bias, float64 [T], of one head if the probe names one."""
    (part,) = columns(probe, hidden.shape[1], heads)
    read: Tensor = hidden[:, part].double() @ _row(probe.direction)
    return read + float(probe.bias)


def _row(vector: Any) -> Tensor:
    return torch.from_numpy(vector.numpy().astype("float64"))


def _rows(vectors: Any) -> Tensor:
    return torch.stack([_row(vector) for vector in vectors])


def _added(edit: Any, h: Tensor) -> Tensor:
    """Return the edit's change of h, float64 [T, H]."""
    if isinstance(edit, Steer):
        return (edit.scale * _row(edit.vector)).expand_as(h)
    if isinstance(edit, Ablate):
        # An orthonormal basis of the directions, by singular values.
        basis = torch.linalg.svd(_rows(edit.directions), full_matrices=False).Vh
        inside: Tensor = (h @ basis.T) @ basis
        return -float(edit.strength) * inside
    if isinstance(edit, Clamp):
        unit = torch.nn.functional.normalize(_row(edit.direction), dim=0)
        x = h @ unit
        return float(edit.strength) * torch.outer(x.clamp(edit.low, edit.high) - x, unit)
    if isinstance(edit, Feature):
        active = h @ _rows(edit.encoder).T + torch.tensor(edit.bias)
        is_on = active > torch.tensor(edit.threshold)
        active = torch.where(is_on, active, torch.zeros_like(active))
        # The doctor tests the mode "set" only.
        return (torch.tensor(edit.value) - active) @ _rows(edit.decoder)
    if isinstance(edit, Affine) and edit.matrix is not None:
        matrix, width = _row(edit.matrix), h.shape[1]
        return float(edit.scale) * (h @ matrix.view(width, width).T + _row(edit.bias) - h)
    if isinstance(edit, Affine):
        inner = h @ _rows(edit.read).T + _row(edit.bias)
        return edit.scale * inner @ _rows(edit.write)
    if isinstance(edit, LoReFT):
        rotation = _rows(edit.rotation)
        return (h @ _rows(edit.weight).T + _row(edit.bias) - h @ rotation.T) @ rotation
    if isinstance(edit, Replace):
        assert isinstance(edit.rows, tuple)
        return edit.alpha * (_row(edit.rows[0]) - h)
    if isinstance(edit, Scale):
        # The doctor tests one factor for all components.
        assert not isinstance(edit.factor, Vector)
        return (edit.factor - 1) * h
    raise TypeError(f"no formula for {type(edit).__name__}")
