"""Codec `rp8`: a random projection to k dimensions, quantised to uint8."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs.affine import HEADER_BYTES, check_affine, decode_affine, encode_affine
from midstream.codecs.base import check_parameter, check_shape, checked_rows

MAX_K = 16384
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Rp8:
    """Random projection (sketch) P x of each row x: 8 + k bytes per row.

    P is Gaussian with entries of variance 1/k. For vectors x and y, ‖Px‖² and Px · Py are unbiased
    estimates of ‖x‖² and x · y (Johnson and Lindenstrauss, 1984; Gaussian form by Indyk and
    Motwani, 1998). Over all projections

    - ‖Px‖² / ‖x‖² has standard deviation √(2/k): 6.3 % for k = 512;
    - Px · Py has standard deviation √((‖x‖² ‖y‖² + (x · y)²) / k).

    The uint8 quantisation adds a negligible error. All rows of an engine share one projection, so
    their errors are not independent. `sketches` has estimates from decoded rows.

    Bytes of a row are those of `full8`, with width k; a sketch beyond float32 is marked as a row
    that is not finite. P x is a float32 product of the device, which on CUDA may be TF32 if the
    process enabled that in PyTorch.

    P follows from k, seed and hidden. Take the 64-bit outputs r[0], r[1], … of Philox4x64-10
    (Salmon et al., 2011) with the key (seed, 0) and the counters (b, 0, 0, 0) for b = 1, 2, 3, …,
    the four outputs of each in order: `numpy.random.Philox(key=seed).random_raw()`. By the
    Box–Muller transform, each pair gives two standard normal numbers, all in float64:

        u = (⌊r[2m] / 2¹¹⌋ + 1) / 2⁵³
        v = ⌊r[2m + 1] / 2¹¹⌋ / 2⁵³
        z[2m] = √(−2 ln u) · cos(2π v)
        z[2m + 1] = √(−2 ln u) · sin(2π v)
        P[i, j] = z[i · hidden + j] / √k, rounded to float32

    Mathematical libraries differ in the last bit of a float64 cosine or logarithm: about one entry
    in 10⁸ differs by one unit in the last place.

    Attributes:
        k: width of the sketch, 1 to 16384. The matrix takes 4 · k · hidden bytes on the device.
        seed: selects the projection, 0 ≤ seed < 2**64.
    """

    k: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_parameter("k", self.k, 1, MAX_K)
        check_parameter("seed", self.seed, 0, MAX_SEED)

    @property
    def spec(self) -> str:
        return f"rp8:k={self.k},seed={self.seed}"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return HEADER_BYTES + self.k

    def sketch(self, rows: Tensor) -> Tensor:
        """Return P x of each row [n, hidden], float32 [n, k], before quantisation.

        The first call on a device creates the projection there, which synchronises: encode zero
        rows once in advance where latency matters.
        """
        rows = checked_rows(rows)
        matrix = projection(self.k, rows.shape[1], self.seed, rows.device)
        return rows.float() @ matrix.T

    def encode(self, rows: Tensor) -> Tensor:
        """Encode the sketches as uint8. A sketch that overflows float32 is marked non-finite."""
        return encode_affine(self.sketch(rows))

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to the sketches, float32 [n, k], with an error of at most half a uint8 step."""
        self.check(data, hidden, dtype)
        return decode_affine(data)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
        check_affine(self.spec, data)


@functools.lru_cache(maxsize=8)
def projection(k: int, hidden: int, seed: int, device: torch.device) -> Tensor:
    """Return the projection, float32 [k, hidden], on a device; caches the last 8."""
    return torch.from_numpy(projection_matrix(k, hidden, seed)).to(device)


def projection_matrix(k: int, hidden: int, seed: int) -> NDArray[np.float32]:
    """Compute the projection, float32 [k, hidden]; `Rp8` specifies it."""
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
