"""The vectors of one completion at one site of one layer, as they came: encoded, in pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import Codec, Raw


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Records that lie anywhere in a memory, as those of a request that generated: one step's are
    behind another's, with those of all other requests between them.

    Attributes:
        memory: uint8 [bytes].
        offsets: int64 [records], where in it each begins.
        taps: how many rows a record has.
        width: bytes of a row.

    Raises:
        ValueError: some lie outside of the memory.
    """

    memory: Tensor
    offsets: NDArray[np.int64]
    taps: int
    width: int

    def __post_init__(self) -> None:
        last = self.memory.numel() - self.taps * self.width
        if self.offsets.size and not 0 <= self.offsets.min() <= self.offsets.max() <= last:
            raise ValueError(f"records lie outside of a memory of {self.memory.numel()} bytes")

    def __len__(self) -> int:
        return len(self.offsets)

    def records(self) -> Tensor:
        """uint8 [records, taps, width], a copy."""
        whole = self._gathered(0, self.taps * self.width)
        return whole.view(len(self), self.taps, self.width)

    def of(self, place: int) -> Tensor:
        """uint8 [records, width], a copy of each record's row at this place."""
        return self._gathered(place * self.width, self.width)

    def _gathered(self, start: int, size: int) -> Tensor:
        """[records, size], these bytes of each."""
        memory = self.memory.numpy()
        # As if something began at every byte: to pick some of those is one call, whatever their
        # number, that copies nothing else.
        every: NDArray[np.uint8] = np.ndarray(
            (memory.size - start - size + 1, size), np.uint8, memory, start, (1, 1)
        )
        return torch.from_numpy(every[self.offsets])


Chunk = Tensor | Scattered


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows.

    Attributes:
        codec: how they are encoded.
        hidden, dtype: of the vectors that were.
        chunks: [records, taps, bytes of a row] each, one after the other.
        places: per chunk, which of its taps this is.
        chosen: int64, which of all those rows, in order; None: all of them as they are.
    """

    codec: Codec
    hidden: int
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    places: tuple[int, ...]
    chosen: Tensor | None = None

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return sum(len(chunk) for chunk in self.chunks)

    def encoded(self) -> Tensor:
        """uint8 [n, bytes of a row]; a view where the rows lie in one piece."""
        if not self.chunks:
            return torch.zeros(0, self.codec.row_bytes(self.hidden, self.dtype), dtype=torch.uint8)
        pieces = [
            chunk[:, place] if isinstance(chunk, Tensor) else chunk.of(place)
            for chunk, place in zip(self.chunks, self.places, strict=True)
        ]
        return self._picked(pieces)

    def decoded(self) -> Tensor:
        """[n, width], as the codec has it; a view where nothing is to be decoded and the rows lie
        in one piece.
        """
        return self.codec.decode(self.encoded(), self.hidden, self.dtype)

    def _picked(self, pieces: list[Tensor]) -> Tensor:
        every = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return every if self.chosen is None else every[self.chosen]


def rows_of(values: Tensor) -> Rows:
    """[n, hidden] in the model's dtype, as if they had come so."""
    encoded = Raw().encode(values)
    return Rows(Raw(), values.shape[1], values.dtype, (encoded[:, None],), (0,))
