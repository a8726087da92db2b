"""The `site` op in plain PyTorch: what it means, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.ops import layout


@torch.no_grad()
def site_ref(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    tally: Tensor,
    table: Tensor,
    edit_rows: Tensor,
    edit_scales: Tensor,
    bank: Tensor,
    ring: Tensor,
) -> None:
    """See `midstream.ops.site.site`, which has the same arguments."""
    num_rows = hidden.shape[0]
    active = tokens[:num_rows, layout.PROGRAM].nonzero().squeeze(1)
    if active.numel() == 0:
        return
    words = tokens[active].long()
    programs = table[words[:, layout.PROGRAM]]
    counts = programs[:, layout.EDIT_COUNT].long()
    _edit(
        hidden, active, programs[:, layout.EDIT_START].long(), counts, edit_rows, edit_scales, bank
    )

    places = table[words[:, layout.GROUP], layout.PLACE].long()
    captured = (words[:, layout.RECORD] > 0) & (places > 0)
    rows = active[captured]
    if rows.numel():
        stream = hidden[rows]
        if residual is not None:
            stream = (stream.float() + residual[rows].float()).to(ring.dtype)
        targets = words[captured, layout.RECORD] - 1 + places[captured] - 1
        ring[targets] = stream.to(ring.dtype)

    tally[active, layout.SIGNATURE] += table[0, layout.CODE]
    tally[active, layout.EDITS] += counts.int()
    tally[active, layout.CAPTURES] += captured.int()


def _edit(
    hidden: Tensor,
    active: Tensor,
    starts: Tensor,
    counts: Tensor,
    edit_rows: Tensor,
    edit_scales: Tensor,
    bank: Tensor,
) -> None:
    """Adds each row's edits in order, in float32, and rounds once to `hidden`'s dtype."""
    edited = counts > 0
    if not bool(edited.any()):
        return
    rows, starts, counts = active[edited], starts[edited], counts[edited]
    values = hidden[rows].float()
    for nth in range(int(counts.max())):
        has = counts > nth
        edits = starts[has] + nth
        values[has] += edit_scales[edits, None] * bank[edit_rows[edits].long()]
    hidden[rows] = values.to(hidden.dtype)
