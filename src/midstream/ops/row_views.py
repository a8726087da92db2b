"""Rows of the op's memory as views, where they are evenly spaced, and as copies elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = slice | Tensor


def by_unit(memory: Tensor, width: int) -> Tensor:
    """Return units [n, U] as a view of the vectors that start at each, [starts, width]."""
    unit = memory.shape[1]
    if unit == width:
        return memory
    starts = max(memory.shape[0] - width // unit + 1, 0)
    return memory.as_strided((starts, width), (unit, 1))


def index(rows: NDArray[np.integer]) -> Index:
    """Return an index for ascending row numbers (at least one): a slice if consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == rows.size - 1:
        return slice(first, last + 1)
    return torch.from_numpy(rows.astype(np.int64))


def spaced(rows: NDArray[np.integer]) -> Index:
    """Return an index for row numbers in any order: a slice if they ascend evenly."""
    first, last = int(rows[0]), int(rows[-1])
    step = int(rows[1]) - first if rows.size > 1 else 1
    if step > 0 and last - first == step * (rows.size - 1):
        even = slice(first, last + 1, step)
        if rows.size <= 2 or (rows == np.arange(first, last + 1, step)).all():
            return even
    return torch.from_numpy(rows.astype(np.int64))
