"""Codec `topk8`: the k values of largest magnitude, as uint8, and where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.affine import (
    HEADER_BYTES,
    check_affine,
    decode_affine,
    encode_affine,
    scales_and_zeros,
)
from midstream.codecs.base import check_parameter, check_shape, checked_rows, refuse_row, reread
from midstream.errors import SpecError

MAX_K = 1 << 20
_UINT16_WIDTHS = 1 << 16  # up to this width an index fits uint16


@dataclass(frozen=True, slots=True)
class Topk8:
    """8 + k + 2k bytes a row (8 + k + 4k where hidden > 65536): scale, zero and k uint8 as those
    of `full8`, then k indices, ascending.

    Which values are kept is exact; among equals the first are. Each is off by half a step of
    uint8 at most, |x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴, scale = (max − min) / 255 of those
    kept, rounded up. All others read 0, and none of them is larger than any that was kept.

    Attributes:
        k: how many values of each row are kept, at least 1 and at most hidden.
    """

    k: int = 64

    def __post_init__(self) -> None:
        check_parameter("k", self.k, 1, MAX_K)

    @property
    def spec(self) -> str:
        return f"topk8:k={self.k}"

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        self._check_width(hidden)
        return HEADER_BYTES + self.k + self.k * _index_dtype(hidden).itemsize

    def encode(self, rows: Tensor) -> Tensor:
        rows = checked_rows(rows)
        hidden = rows.shape[1]
        self._check_width(hidden)
        indices = _magnitude_keys(rows).topk(self.k, dim=1, sorted=False).indices.sort(dim=1).values
        # What is not finite is larger than all else: it is among these, and marks the row.
        values = encode_affine(rows.gather(1, indices))
        places = indices.to(_index_dtype(hidden)).view(torch.uint8)
        return torch.cat([values, places], dim=1)

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """float32 [n, hidden], 0 where nothing was kept."""
        self.check(data, hidden, dtype)
        _, zero = scales_and_zeros(data)
        # NaN throughout a row that is marked, 0 in all others.
        full = torch.where(zero.isnan(), zero, 0.0).repeat(1, hidden)
        return full.scatter_(1, self.indices(data, hidden), decode_affine(self._values(data)))

    def indices(self, data: Tensor, hidden: int) -> Tensor:
        """int64 [n, k]: where the values of each row were, ascending."""
        dtype = _index_dtype(hidden)
        stored = reread(data[:, HEADER_BYTES + self.k :], dtype).long()
        return stored & ((1 << 8 * dtype.itemsize) - 1)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
        check_affine(self, self._values(data))
        indices = self.indices(data, hidden)
        refuse_row(self, (indices >= hidden).any(dim=1), f"an index is not below {hidden}")
        refuse_row(self, (indices.diff(dim=1) <= 0).any(dim=1), "the indices do not ascend")

    def _values(self, data: Tensor) -> Tensor:
        """The part of each row that is as `affine` has it, uint8 [n, 8 + k]."""
        return data[:, : HEADER_BYTES + self.k]

    def _check_width(self, hidden: int) -> None:
        if hidden < self.k:
            raise SpecError(
                "codec.k", f"expected at most {hidden}, the width of the vectors, got {self.k}"
            )


def _index_dtype(hidden: int) -> torch.dtype:
    """Of the width of an index. Its sign is none: an index wraps into it, and out again."""
    return torch.int16 if hidden <= _UINT16_WIDTHS else torch.int32


def _magnitude_keys(rows: Tensor) -> Tensor:
    """Integers [n, hidden] in the order of magnitude and, among equals, of nearness to the front.

    A float without its sign is ordered as the integer in the same bits; below those bits there is
    room for the index.
    """
    hidden = rows.shape[1]
    narrow = rows.element_size() == 2 and hidden <= 1 << 16
    bits = rows.abs().view(torch.int16 if rows.element_size() == 2 else torch.int32)
    keys = bits.to(torch.int32 if narrow else torch.int64) << (16 if narrow else 32)
    return keys.sub_(torch.arange(hidden, dtype=keys.dtype, device=keys.device))
