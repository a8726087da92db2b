"""Captured rows of one completion at one site and layer: encoded, in one or more chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from midstream.codecs import Codec


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Records of `taps` rows of `width` bytes, at offsets in bytes of a buffer with others."""

    memory: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    taps: int
    width: int

    def __post_init__(self) -> None:
        last = self.memory.size - self.taps * self.width
        if self.offsets.size and not 0 <= self.offsets.min() <= self.offsets.max() <= last:
            raise ValueError(f"records lie outside of a memory of {self.memory.size} bytes")

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return len(self) * self.taps * self.width

    def records(self) -> Tensor:
        """Return a copy of all records, uint8 [records, taps, width]."""
        whole = self._gather(0, self.taps * self.width)
        return whole.view(len(self), self.taps, self.width)

    def of(self, place: int) -> Tensor:
        """Return a copy of each record's row of one tap, by its index, uint8 [records, width]."""
        return self._gather(place * self.width, self.width)

    def _gather(self, start: int, size: int) -> Tensor:
        """Return `size` bytes of each record from byte `start` on, uint8 [records, size]."""
        memory = self.memory
        # A view with a row starting at every byte: indexing it gathers all records in one call,
        # and copies only their bytes.
        every: NDArray[np.uint8] = np.ndarray(
            (memory.size - start - size + 1, size), np.uint8, memory, start, (1, 1)
        )
        import torch

        return torch.from_numpy(every[self.offsets])


Chunk = Union["Tensor", Scattered]


class UnreadChunks(Sequence[Chunk]):
    """The single chunk of a block that was sent, as bytes until it is first read as a tensor."""

    __slots__ = ("_chunk", "_data", "_shape")

    def __init__(self, data: memoryview, taps: int, width: int) -> None:
        """Create it of records of `taps` rows of `width` bytes."""
        self._data = data
        self._shape = -1, taps, width
        self._chunk: Tensor | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Chunk]:
        yield self._read()

    def __getitem__(self, index: Any) -> Any:
        return (self._read(),)[index]

    @property
    def array(self) -> NDArray[np.uint8]:
        """The chunk as an array that is only read: the bytes are not copied for it."""
        if self._chunk is not None:
            return self._chunk.numpy()
        return np.frombuffer(self._data, np.uint8).reshape(self._shape)

    def _read(self) -> Tensor:
        if self._chunk is None:
            import torch

            # A writable copy: tensors over read-only memory are a trap.
            copy = np.frombuffer(bytearray(self._data), np.uint8)
            self._chunk = torch.from_numpy(copy.reshape(self._shape))
        return self._chunk


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows of one site and layer.

    Attributes:
        dtype: dtype of the captured vectors.
        chunks: uint8 [records, taps, bytes of a row] each, in order.
        places: index of this tap in the records of each chunk.
        chosen: int64, indices of the selected rows among all rows; None: all of them.
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

    def alone(self) -> Rows:
        """Return the rows in one chunk, in memory without other rows."""
        encoded = self.encoded()
        if encoded.untyped_storage().nbytes() != encoded.nbytes:
            encoded = encoded.clone()
        return self._of(encoded)

    def encoded(self) -> Tensor:
        """Return the encoded rows, uint8 [n, bytes of a row]; a view if they are contiguous."""
        import torch

        if not self.chunks:
            return torch.zeros(0, self.codec.row_bytes(self.hidden, self.dtype), dtype=torch.uint8)
        pieces = [
            chunk.of(place) if isinstance(chunk, Scattered) else chunk[:, place]
            for chunk, place in zip(self.chunks, self.places, strict=True)
        ]
        every = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return every if self.chosen is None else every[self.chosen]

    def copy(self) -> Rows:
        """Return the rows in memory of their own."""
        return self._of(self.encoded().clone())

    def _of(self, encoded: Tensor) -> Rows:
        return replace(self, chunks=(encoded[:, None],), places=(0,), chosen=None)

    def decoded(self) -> Tensor:
        """Return the decoded rows, [n, hidden]; a view of contiguous raw ones."""
        return self.codec.decode(self.encoded(), self.hidden, self.dtype)


def rows_of(values: Tensor) -> Rows:
    """Return vectors [n, hidden] in the model's dtype as raw encoded rows."""
    from midstream.codecs import Raw

    encoded = Raw().encode(values)
    return Rows(Raw(), values.shape[1], values.dtype, (encoded[:, None],), (0,))
