"""Writing of changed rows: into one tensor, or into vLLM's hidden and residual, whose sum is the
stream, with the digits of both: residual = round(row), hidden = round(row − residual).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.row_views import Index

Flagged = NDArray[np.bool_] | bool


def write_rows(
    hidden: Tensor,  # [T, W], mutated
    residual: Tensor | None,  # likewise
    rows: Index,
    delta: Tensor,  # float32 [n, W] or [W], added to the rows; where `whole`, the rows themselves
    whole: Tensor | None = None,  # bool [n, 1]
) -> Flagged:
    """Write n rows of the stream; return which have a value that saturated or is not finite. A
    component that is as it was keeps its bits, a zero's sign too.
    """
    half = hidden[rows].float()
    rest = None if residual is None else residual[rows].float()
    entered = half if rest is None else half + rest
    row, lost = _sum(half, rest, delta)
    same = delta == 0
    if whole is not None:
        kept = delta.view(torch.int32) == entered.view(torch.int32)
        row, same = torch.where(whole, delta, row), torch.where(whole, kept, same)
        lost = None if lost is None else lost.masked_fill(whole, 0.0)
    target = hidden if residual is None else residual
    flagged: Flagged = False
    low, high = torch.aminmax(row)  # both are NaN if any value is
    limit = layout.limit_of(str(target.dtype).removeprefix("torch."))
    if not (-limit <= float(low) and float(high) <= limit):
        bound = torch.full_like(row, limit)
        if target.dtype == torch.float16:
            size = entered.abs()
            was_beyond = (size > limit) & (size <= torch.finfo(target.dtype).max)
            bound = torch.where(was_beyond, size, bound)
        beyond = ~same & ~(row.abs() <= bound)
        row = torch.where(beyond, row.nan_to_num(0.0).clamp(-bound, bound), row)
        lost = None if lost is None else lost.masked_fill(beyond, 0.0)
        flagged = (beyond | ~row.isfinite()).any(1).numpy()
    upper = row.to(target.dtype)
    target[rows] = torch.where(same, target[rows], upper)
    if lost is not None:
        lower = ((row - upper.float()) + lost).to(hidden.dtype)
        hidden[rows] = torch.where(same, hidden[rows], lower)
    return flagged


def _sum(half: Tensor, rest: Tensor | None, delta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return half + rest + delta, and what rounding took off the second sum (Knuth's two-sum)."""
    added = half + delta
    if rest is None:
        return added, None
    row = rest + added
    back = row - rest
    return row, (rest - (row - back)) + (added - back)


def nonfinite(rows: Tensor) -> Flagged:
    """Return which rows have a value that is not finite; False: none."""
    low, high = torch.aminmax(rows)  # both are NaN if any value is
    if -math.inf < float(low) and float(high) < math.inf:
        return False
    return (~rows.isfinite().all(1)).numpy()
