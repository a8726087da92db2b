"""Codec `raw`: the bytes of the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.base import bytes_of, check_shape, checked_rows, view_as


@dataclass(frozen=True, slots=True)
class Raw:
    """Lossless encoding: hidden · itemsize bytes per row, little-endian."""

    @property
    def spec(self) -> str:
        return "raw"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Encode; returns a view of `rows` if it is contiguous."""
        return bytes_of(checked_rows(rows))

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to [n, hidden] in `dtype`, bit-exact; a view of `data` where alignment allows."""
        self.check(data, hidden, dtype)
        return view_as(data, dtype)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
