"""A shard's file: its header and tensors, checked against the checksums before they are used."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.backends.base import File, Folder
from midstream.store.format.checksums import JOB, block_sums, each_of, in_parallel
from midstream.store.format.layout import BLOCK, Layout, Place, header_length, read_head


class CheckedFile:
    """The bytes of a shard: each block is compared with its checksum before it is first used.

    Every StoreError begins with the shard's path.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        """Open the file; read and check its header and the list of checksums."""
        self.name = name
        self._folder = folder
        with self.named():
            file = folder.open(name)
            self.size = file.size
            length = header_length(bytes(file.read(0, min(8, file.size))), file.size)
            head = bytes(file.read(0, 8 + length))
            self.layout: Layout = read_head(head, file.size)
            if name in self.layout.replaces:
                raise StoreError("replaces: the shard lists itself")
            self.head_bytes = len(head)  # before its first tensor
            self.places: Mapping[str, Place] = self.layout.places()
            place, first = self.places["checksums"], self.head_bytes
            words = np.frombuffer(bytes(file.read(first + place.start, first + place.stop)), "<u4")
            if zlib.crc32(words[:-1].tobytes()) != words[-1]:
                raise StoreError("damaged: the list of checksums does not match its own checksum")
            if zlib.crc32(head) != words[0]:
                raise StoreError("damaged: the header does not match its checksum")
            self._sums = words[1:-1]
            self._verified = np.zeros(len(self._sums), np.bool_)
            self._asked = np.zeros(len(self._sums), np.bool_)  # the system was asked to read them

    @property
    def path(self) -> str:
        return f"{self._folder}/{self.name}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix StoreErrors of the block with the file's path, unless they start with it."""
        try:
            yield
        except StoreError as error:
            if str(error).startswith(self.path):
                raise
            raise StoreError(f"{self.path}: {error}") from error.__cause__

    def read(self, tensor: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a tensor. Raises StoreError if they are damaged."""
        first = self.places[tensor].start
        start, stop = first + start, first + stop
        with self.named():
            if stop > start:
                self._check(start // BLOCK, -(-stop // BLOCK))
            return self._open().read(self.head_bytes + start, self.head_bytes + stop)

    def gather_rows(
        self, tensor: str, rows: NDArray[np.int64], checked: bool = True
    ) -> NDArray[np.uint8]:
        """Copy rows of a 2-dimensional tensor by index to uint8 [n, row_bytes], in order.

        `checked`: compare them with their checksums.
        """
        place = self.places[tensor]
        width = place.shape[1]
        with self.named():
            if checked:
                self._check_rows(place.start + rows * width, width)
            return self._open().gather(self.head_bytes + place.start, width, rows)

    def locate_rows(
        self, tensors: Sequence[str], rows: Sequence[NDArray[np.int64]]
    ) -> tuple[File, NDArray[np.int64]]:
        """Return the file, and where row rows[j][i] of tensor j begins in it, int64 [n, tensors].

        They are not compared with their checksums.
        """
        starts = np.empty((len(rows[0]), len(rows)), np.int64)
        for number, (tensor, of_tensor) in enumerate(zip(tensors, rows, strict=True)):
            place = self.places[tensor]
            # They become addresses.
            if of_tensor.size and not 0 <= of_tensor.min() <= of_tensor.max() < place.shape[0]:
                raise StoreError(f"{self.path}: damaged: {tensor} has {place.shape[0]} rows")
            first = self.head_bytes + place.start
            starts[:, number] = first + of_tensor * place.shape[1]
        with self.named():
            return self._open(), starts

    def prepare_rows(
        self, tensor: str, rows: NDArray[np.int64], checked: bool, again: bool
    ) -> None:
        """Have the system read rows, int64 [n] ascending, and check them if `checked`.

        `again`: also those that it was asked for before; it may have dropped them since.
        """
        place = self.places[tensor]
        width = place.shape[1]
        starts = place.start + rows * width
        # The call takes a tenth of the time of a copy, even for what is in memory.
        asked = self._asked[int(starts[0]) // BLOCK : (int(starts[-1]) + width - 1) // BLOCK + 1]
        with self.named():
            if again or not asked.all():
                file = self._open()
                for run in np.split(starts, np.flatnonzero(np.diff(starts) > width) + 1):
                    start, stop = int(run[0]), int(run[-1]) + width
                    file.will_need(self.head_bytes + start, self.head_bytes + stop)
                    self._asked[start // BLOCK : -(-stop // BLOCK)] = True
            if checked:
                self._check_rows(starts, width)

    @property
    def is_mapped(self) -> bool:
        """Whether single rows are read as fast as many that are next to each other."""
        return self._open().address is not None

    def check(self) -> None:
        """Compare every block with its checksum. Raises StoreError if one is damaged."""
        with self.named():
            self._check(0, len(self._sums))

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes of the file in order, unchecked."""
        file = self._open()
        for start in range(0, self.size, JOB):
            yield file.read(start, min(start + JOB, self.size))

    def _open(self) -> File:
        try:
            file = self._folder.open(self.name)
        except StoreError as error:
            raise StoreError(f"{error}; the shard was removed, call `refresh`") from error
        if file.size != self.size:
            raise StoreError(f"the file changed: expected {self.size} bytes, got {file.size}")
        return file

    def _check(self, start: int, stop: int) -> None:
        """Compare blocks [start, stop) with their checksums, unless all were checked before."""
        if self._verified[start:stop].all():
            return
        file = self._open()
        end = self.places["checksums"].start

        def sums(first: int, last: int) -> list[int]:
            return block_sums([file.read(self.head_bytes + first, self.head_bytes + last)])

        parts = in_parallel(sums, start * BLOCK, min(stop * BLOCK, end))
        checksums = np.fromiter(itertools.chain.from_iterable(parts), np.uint32)
        wrong = np.flatnonzero(checksums != self._sums[start:stop])
        if len(wrong):
            raise StoreError(self._damage(start + int(wrong[0])))
        self._verified[start:stop] = True

    def _check_rows(self, starts: NDArray[np.int64], width: int) -> None:
        if self._verified.all():
            return
        first, last = starts // BLOCK, (starts + width - 1) // BLOCK
        if width <= BLOCK and self._verified[first].all() and self._verified[last].all():
            return
        depth = np.zeros(len(self._verified) + 1, np.int64)
        np.add.at(depth, first, 1)
        np.add.at(depth, last + 1, -1)
        unknown = np.flatnonzero((depth.cumsum()[:-1] > 0) & ~self._verified)
        runs = np.split(unknown, np.flatnonzero(np.diff(unknown) > 1) + 1)
        each_of(
            [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)],
            self._check,
            len(unknown) * BLOCK,
        )

    def _damage(self, block: int) -> str:
        start, stop = block * BLOCK, (block + 1) * BLOCK
        tensors = [(name, place) for name, place in self.places.items() if name != "checksums"]
        names = [name for name, place in tensors if place.start < stop and place.stop > start]
        return (
            f"damaged: {', '.join(names[:3])}{'' if len(names) <= 3 else ' …'} "
            f"does not match its checksum, near byte {self.head_bytes + start}"
        )
