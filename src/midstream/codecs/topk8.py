"""Codec `topk8`: the k values of largest magnitude, as uint8, with their indices."""

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
from midstream.codecs.base import check_parameter, check_shape, checked_rows, reject_rows, view_as
from midstream.errors import SpecError

MAX_K = 1 << 20
_UINT16_WIDTHS = 1 << 16  # up to this width an index fits uint16


@dataclass(frozen=True, slots=True)
class Topk8:
    """The k values of largest magnitude: 8 + k + 2k bytes per row, 8 + k + 4k if hidden > 65536.

    A row has scale, zero and k uint8 as in `full8`, in the order of the indices, then k ascending
    indices: uint16, or uint32 if hidden > 65536. A row that is not finite has the mark of `full8`;
    its non-finite values count as larger than all others.

    The selection is exact; among equal magnitudes the first are kept. Each kept value has an error
    of at most half a uint8 step, |x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴, scale =
    (max − min) / 255 of the kept values, rounded up. All other values decode to 0.

    Attributes:
        k: number of values kept per row, at least 1 and at most hidden.
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
        # Non-finite values have the largest keys, so they are selected and mark the row.
        values = encode_affine(rows.gather(1, indices))
        places = indices.to(_index_dtype(hidden)).view(torch.uint8)
        return torch.cat([values, places], dim=1)

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to float32 [n, hidden], 0 where no value was kept."""
        self.check(data, hidden, dtype)
        _, zero = scales_and_zeros(data)
        # NaN throughout a marked row, 0 in all others.
        full = torch.where(zero.isnan(), zero, 0.0).repeat(1, hidden)
        return full.scatter_(1, self.indices(data, hidden), decode_affine(self._values(data)))

    def indices(self, data: Tensor, hidden: int) -> Tensor:
        """Return the ascending indices of the kept values of each row, int64 [n, k]."""
        dtype = _index_dtype(hidden)
        stored = view_as(data[:, HEADER_BYTES + self.k :], dtype).long()
        return stored & ((1 << 8 * dtype.itemsize) - 1)

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        check_shape(self, data, hidden, dtype)
        check_affine(self.spec, self._values(data))
        indices = self.indices(data, hidden)
        reject_rows(self.spec, (indices >= hidden).any(dim=1), f"an index is not below {hidden}")
        reject_rows(self.spec, (indices.diff(dim=1) <= 0).any(dim=1), "the indices do not ascend")

    def _values(self, data: Tensor) -> Tensor:
        """Return the quantised values with their headers, uint8 [n, 8 + k]; see `affine`."""
        return data[:, : HEADER_BYTES + self.k]

    def _check_width(self, hidden: int) -> None:
        if hidden < self.k:
            raise SpecError(
                "codec.k", f"expected at most {hidden}, the width of the vectors, got {self.k}"
            )


def _index_dtype(hidden: int) -> torch.dtype:
    """Return the dtype of stored indices; unsigned values are stored in its bits."""
    return torch.int16 if hidden <= _UINT16_WIDTHS else torch.int32


def _magnitude_keys(rows: Tensor) -> Tensor:
    """Return integer keys [n, hidden]: float bits order magnitudes; lower indices win."""
    hidden = rows.shape[1]
    narrow = rows.element_size() == 2 and hidden <= 1 << 16
    bits = rows.abs().view(torch.int16 if rows.element_size() == 2 else torch.int32)
    keys = bits.to(torch.int32 if narrow else torch.int64) << (16 if narrow else 32)
    return keys.sub_(torch.arange(hidden, dtype=keys.dtype, device=keys.device))
