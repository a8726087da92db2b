"""Codec `full8`: every value as uint8, with a scale and a zero per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.affine import HEADER_BYTES, check_affine, decode_affine, encode_affine
from midstream.codecs.base import check_shape, checked_rows


@dataclass(frozen=True, slots=True)
class Full8:
    """uint8 quantisation of all values: 8 + hidden bytes per row.

    The error is at most half a step of the row: |x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴ with
    scale = (max − min) / 255 of the row, rounded up. An outlier therefore reduces the precision of
    the row's other values.

    Bytes of a row, little-endian: scale (float32), zero (float32), then q (uint8) of each value.

    A value decodes to zero + scale · q: a product and a sum in float32, each rounded to the
    nearest. Where |zero| + 255 · scale > 2¹²⁶, it is computed in float64, clipped to ± the largest
    float32, and rounded once.

    Encoding: zero = min and scale = (max − min) / 255 of the row, computed in float64 and rounded
    up to a float32, so that no q is more than 255. q = (x − zero) / scale, a difference and a
    quotient in float32, rounded to the nearest integer, halves to even. Where max − min is beyond
    float32, x, zero and scale are halved first. The minimum is exact, and so is a row of equal
    values: its scale and q are 0. Of the two zeros, +0 is written.

    A row that is not finite has scale 0, the NaN with bits 7fc00000 as zero, and every q 0, and
    decodes to NaN. No other NaN is ever written.
    """

    @property
    def spec(self) -> str:
        return "full8"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return HEADER_BYTES + hidden

    def encode(self, rows: Tensor) -> Tensor:
        return encode_affine(checked_rows(rows))

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to float32 [n, hidden]."""
        self.check(data, hidden, dtype)
        return decode_affine(data)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
        check_affine(self.spec, data)
