"""Codec `rp8`: a random projection to k dimensions, each of them as uint8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.affine import HEADER_BYTES, check_affine, decode_affine, encode_affine
from midstream.codecs.base import check_parameter, check_shape, checked_rows
from midstream.codecs.projection import projection

MAX_K = 16384
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Rp8:
    """8 + k bytes a row: its sketch P x, P Gaussian with entries of variance 1/k.

    Of vectors x and y, with ‖Px‖² for ‖x‖² and Px · Py for x · y, nothing is biased (Johnson and
    Lindenstrauss, 1984; Gaussian as by Indyk and Motwani, 1998), and over all projections

    - ‖Px‖² / ‖x‖² has standard deviation √(2/k): 6.3 % for k = 512;
    - Px · Py has standard deviation √((‖x‖² ‖y‖² + (x · y)²) / k).

    Half a step of uint8 adds next to nothing to that. All rows of an engine share one projection,
    so their errors are not independent of each other. See `projection` for what P is, and
    `sketches` for what can be asked of decoded rows.

    Attributes:
        k: width of the sketch, 1 to 16384. The device holds 4 · k · hidden bytes for the matrix.
        seed: which projection, 0 ≤ seed < 2**64.
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
        """float32 [n, k]: P x of each row [n, hidden], as it is before it becomes uint8.

        The first call for a device makes the projection there, which waits for it: encode no rows
        at all, once, before time matters.
        """
        rows = checked_rows(rows)
        matrix = projection(self.k, rows.shape[1], self.seed, rows.device)
        return rows.float() @ matrix.T

    def encode(self, rows: Tensor) -> Tensor:
        """As `sketch`, then uint8. A row whose sketch overflows float32 is marked as not finite."""
        return encode_affine(self.sketch(rows))

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """float32 [n, k]: the sketch of each row, off by half a step of uint8 at most."""
        self.check(data, hidden, dtype)
        return decode_affine(data)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
        check_affine(self, data)
