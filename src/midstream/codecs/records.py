"""Encoding of records: the captured vectors of one token, one after the other, of any widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from midstream.codecs.base import Codec
from midstream.codecs.raw import Raw


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """How a codec encodes records that lie in memory made of units of U numbers.

    An encoded row is one unit if the codec is raw, one vector if all vectors of a record have the
    same width, and else one record.

    Attributes:
        codec: the codec of each vector.
        parts: (width, count) of the neighbouring vectors of one width in an encoded row, in order.
        units: units of an encoded row.
    """

    codec: Codec
    parts: tuple[tuple[int, int], ...]
    units: int

    @staticmethod
    def of(codec: Codec, widths: Sequence[int], unit: int) -> RowEncoding:
        """Return the encoding of records of vectors of these widths, multiples of `unit`."""
        if isinstance(codec, Raw):
            return RowEncoding(codec, ((unit, 1),), 1)
        parts = tuple((width, len(list(same))) for width, same in groupby(widths))
        if len(parts) == 1:
            parts = ((parts[0][0], 1),)
        numbers = sum(width * count for width, count in parts)
        return RowEncoding(codec, parts, numbers // unit)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an encoded row; SpecError: vectors too short for the codec."""
        return sum(self.codec.row_bytes(width, dtype) * count for width, count in self.parts)

    def encode(self, units: Tensor) -> Tensor:
        """Encode contiguous [n, U] to uint8 [n / `units`, row_bytes]; may share memory."""
        rows = units.view(-1, self.units * units.shape[1])
        if len(self.parts) == 1:
            return self.codec.encode(rows)
        blocks, start = [], 0
        for width, count in self.parts:
            vectors = rows[:, start : start + width * count].reshape(-1, width)
            encoded = self.codec.encode(vectors)
            blocks.append(encoded.reshape(rows.shape[0], count * encoded.shape[1]))
            start += width * count
        return torch.cat(blocks, 1)
