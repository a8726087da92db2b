"""Random projection matrix of codec `rp8`, reproducible from k, seed and hidden.

`docs/codecs.md` specifies it: Philox4x64-10 and Box-Muller, in float64, rounded to float32.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@functools.lru_cache(maxsize=8)
def projection(k: int, hidden: int, seed: int, device: torch.device) -> Tensor:
    """Return the projection, float32 [k, hidden], on a device; caches the last 8."""
    return torch.from_numpy(projection_matrix(k, hidden, seed)).to(device)


def projection_matrix(k: int, hidden: int, seed: int) -> NDArray[np.float32]:
    """Compute the projection, float32 [k, hidden]; see `docs/codecs.md`."""
    count = k * hidden
    pairs = -(-count // 2)
    # numpy guarantees the raw outputs of bit generators, but not its distributions.
    raw = np.random.Philox(key=seed).random_raw(2 * pairs)
    units = (raw >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((units[0::2] + 1) * 2.0**-53))
    angle = 2 * np.pi * (units[1::2] * 2.0**-53)
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    entries: NDArray[np.float32] = (normals[:count] / np.sqrt(k)).astype(np.float32)
    return entries.reshape(k, hidden)
