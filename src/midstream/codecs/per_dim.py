"""Codec `full8:per=dim`: every value of a block of rows as uint8, with a scale per dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs.affine import HEADER_BYTES, check_affine, decode_affine, encode_affine
from midstream.codecs.base import checked_rows
from midstream.errors import CodecError


@dataclass(frozen=True, slots=True)
class Full8PerDim:
    """uint8 quantisation with a scale and a zero per dimension, over all rows of a block.

    The block is the transpose of its rows, encoded by `full8`: (8 + n) · hidden bytes. The error is
    at most half a step of the dimension, so an outlier dimension reduces the precision of no other.
    A dimension with a value that is not finite decodes to NaN in every row.

    The scales depend on all rows, so this is no `Codec`, which encodes rows one by one as they are
    captured: a complete block is encoded on the host.
    """

    @property
    def spec(self) -> str:
        """The codec as text."""
        return "full8:per=dim"

    def encode(self, rows: Tensor) -> Tensor:
        """Encode a block [n, hidden], float32, bfloat16 or float16, to uint8 [hidden, 8 + n]."""
        columns = checked_rows(rows).T.contiguous()
        if not columns.shape[1]:
            return torch.zeros(len(columns), HEADER_BYTES, dtype=torch.uint8, device=rows.device)
        return encode_affine(columns)

    def decode(self, data: Tensor) -> Tensor:
        """Decode uint8 [hidden, 8 + n] of `encode` to float32 [n, hidden]."""
        if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] < HEADER_BYTES:
            got = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
            raise CodecError(f"{self.spec}: expected uint8 [hidden, 8 + rows], got {got}")
        check_affine(self.spec, data)
        return decode_affine(data).T.contiguous()
