"""Codec `raw`: the bytes of the model's own dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.base import check_shape, checked_rows, reread


@dataclass(frozen=True, slots=True)
class Raw:
    """Nothing is lost, nothing is saved: hidden · itemsize bytes a row, little-endian."""

    @property
    def spec(self) -> str:
        return "raw"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """The memory of `rows` itself, where they lie together in it."""
        rows = checked_rows(rows)
        width = self.row_bytes(rows.shape[1], rows.dtype)
        return rows.reshape(-1).view(torch.uint8).view(len(rows), width)

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """[n, hidden] in `dtype`, bit by bit as encoded; a view of `data` where memory allows."""
        self.check(data, hidden, dtype)
        return reread(data, dtype)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
