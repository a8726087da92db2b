"""Random projection matrix of codec `rp8`, reproducible from k, seed and hidden.

Entry (i, j) of the matrix [k, hidden] is number i · hidden + j of a sequence of standard normal
numbers, divided by √k. The sequence comes from the 64-bit outputs r₀, r₁, … of Philox4x64-10
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) with key (seed, 0) and
counter (b, 0, 0, 0), b = 1, 2, 3, …, four outputs each, two by two through Box and Muller:

    u = (⌊r₂ₘ / 2¹¹⌋ + 1) / 2⁵³            in (0, 1]
    v = ⌊r₂ₘ₊₁ / 2¹¹⌋ / 2⁵³                in [0, 1)
    z₂ₘ   = √(−2 ln u) · cos(2π v)
    z₂ₘ₊₁ = √(−2 ln u) · sin(2π v)

in float64, rounded to float32 at the end. Libraries differ in the last bit of a cosine, so a few
entries in a billion may differ by one unit in float32's last place.
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
    """Compute the projection, float32 [k, hidden]; see the module's docstring."""
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
