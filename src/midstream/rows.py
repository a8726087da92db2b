"""The vectors of one completion at one site of one layer, as they came: encoded, in pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs import Codec, Raw


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows.

    Attributes:
        codec: how they are encoded.
        hidden, dtype: of the vectors that were.
        chunks: uint8 [records, taps, bytes of a row] each, one after the other.
        places: per chunk, which of its taps this is.
        chosen: int64, which of all those rows, in order; None: all of them as they are.
    """

    codec: Codec
    hidden: int
    dtype: torch.dtype
    chunks: tuple[Tensor, ...]
    places: tuple[int, ...]
    chosen: Tensor | None = None

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return sum(chunk.shape[0] for chunk in self.chunks)

    def encoded(self) -> Tensor:
        """uint8 [n, bytes of a row]; a view where the rows lie in one piece."""
        width = self.codec.row_bytes(self.hidden, self.dtype)
        pieces = [
            chunk[:, place] for chunk, place in zip(self.chunks, self.places, strict=True)
        ] or [torch.zeros(0, width, dtype=torch.uint8)]
        return self._picked(pieces)

    def decoded(self) -> Tensor:
        """[n, width], as the codec has it; a view where nothing is to be decoded and the rows lie
        in one piece.
        """
        if not isinstance(self.codec, Raw) or not self.chunks:
            return self.codec.decode(self.encoded(), self.hidden, self.dtype)
        pieces = []
        for chunk, place in zip(self.chunks, self.places, strict=True):
            records, taps, width = chunk.shape
            vectors = self.codec.decode(
                chunk.reshape(records * taps, width), self.hidden, self.dtype
            )
            pieces.append(vectors.view(records, taps, self.hidden)[:, place])
        return self._picked(pieces)

    def _picked(self, pieces: list[Tensor]) -> Tensor:
        every = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return every if self.chosen is None else every[self.chosen]


def rows_of(values: Tensor) -> Rows:
    """[n, hidden] in the model's dtype, as if they had come so."""
    encoded = Raw().encode(values)
    return Rows(Raw(), values.shape[1], values.dtype, (encoded[:, None],), (0,))
