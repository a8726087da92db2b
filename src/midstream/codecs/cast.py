"""Codec `cast`: every value rounded to a shorter dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.base import bytes_of, check_shape, checked_rows, view_as
from midstream.errors import SpecError
from midstream.validation import listed, show

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Cast:
    """Values rounded to the nearest of another dtype, halves to even: hidden · itemsize bytes.

    |x − x̂| is at most |x| · 2⁻⁸ for bfloat16, |x| · 2⁻¹¹ or 2⁻²⁵ for float16, |x| · 2⁻⁴ or 2⁻¹⁰ for
    float8_e4m3fn, whichever is larger. Finite values beyond the dtype's range become its largest:
    65,504 for float16, 448 for float8_e4m3fn. Values that are not finite stay so; float8_e4m3fn has
    no infinities, and these become NaN.

    Attributes:
        dtype: "bfloat16", "float16" or "float8_e4m3fn".
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise SpecError("dtype", f"expected one of {listed(_DTYPES)}, got {show(self.dtype)}")

    @property
    def spec(self) -> str:
        return f"cast:dtype={self.dtype}"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * _DTYPES[self.dtype].itemsize

    def encode(self, rows: Tensor) -> Tensor:
        rows, target = checked_rows(rows), _DTYPES[self.dtype]
        if rows.dtype != target:
            wide, most = rows.float(), torch.finfo(target).max
            beyond = torch.nan if target == torch.float8_e4m3fn else wide
            rows = torch.where(wide.isinf(), beyond, wide.clamp(-most, most)).to(target)
        return bytes_of(rows)

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to float32 [n, hidden]."""
        self.check(data, hidden, dtype)
        return view_as(data, _DTYPES[self.dtype]).float()

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
