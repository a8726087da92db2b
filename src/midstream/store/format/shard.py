"""Reader of one shard, a safetensors file whose every offset is checked: files are untrusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.backends.base import Folder
from midstream.store.format.checked_file import CheckedFile
from midstream.store.format.entry import Header
from midstream.store.format.layout import MAX_REQUESTS, Group, tap_name, tap_order
from midstream.store.format.lines import Line, read_line, read_metadata
from midstream.store.format.request_index import RequestIndex, Run

_DTYPES: dict[str, Any] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}


class Shard:
    """A shard whose header and list of requests were checked, as is all data: see `CheckedFile`."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._file = CheckedFile(folder, name)
        self.name = name
        self.size = self._file.size
        self.layout = self._file.layout
        self.header: Header = self.layout.header
        self.head_bytes = self._file.head_bytes
        with self._file.named():
            self.lines: tuple[Line, ...] = self._read_lines()
            self._index = RequestIndex(self.layout, self.lines)

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {len(self.lines)} requests)"

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of taps that share an index."""
        return self.layout.groups

    @property
    def path(self) -> str:
        """The shard's path or URL, for messages."""
        return self._file.path

    def owners(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (request indices int64 [m], row bounds [m + 1]) of a group; see `RequestIndex`."""
        return self._index.owners[group]

    def taps(self, request: int) -> tuple[Tap, ...]:
        """Return the taps of a request by index, including taps without rows."""
        every = (tap for run in self.runs(request) for tap in self.groups[run.group].taps)
        return tuple(sorted(every, key=tap_order))

    def runs(self, request: int) -> tuple[Run, ...]:
        """Return the runs of a request by index, by ascending group."""
        return self._index.runs[request]

    def metadata(self, request: int) -> dict[str, Any]:
        """Return the metadata of a request by index. Raises StoreError if it is damaged."""
        with self._file.named():
            return read_metadata(self.metadata_text(request))

    def metadata_text(self, request: int) -> bytes:
        """Return the metadata of a request as stored: a line of JSON."""
        return bytes(self._file.read("metadata", *self._index.metadata[request]))

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes of the file in order."""
        return self._file.pieces()

    def column(
        self, group: int, name: str, start: int = 0, stop: int | None = None
    ) -> NDArray[Any]:
        """Return rows of a group's "position", "token_id" (int64) or "request" (int32) in place."""
        tensor = f"g{group}.{name}"
        place = self._file.places[tensor]
        dtype = _DTYPES[place.dtype]
        stop = place.shape[0] if stop is None else stop
        part = self._file.read(tensor, start * dtype.itemsize, stop * dtype.itemsize)
        return np.frombuffer(part, dtype)

    def rows(self, group: int, tap: Tap, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows of a tap, uint8 [n, row_bytes], read-only. StoreError: they are damaged."""
        tensor = tap_name(group, tap)
        width = self._file.places[tensor].shape[1]
        part = self._file.read(tensor, start * width, stop * width)
        return np.frombuffer(part, np.uint8).reshape(stop - start, width)

    def gather(self, group: int, tap: Tap, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Copy rows of a tap by index to uint8 [n, row_bytes], in the order of `rows`."""
        return self._file.gather(tap_name(group, tap), rows)

    def check(self) -> None:
        """Compare every block with its checksum."""
        self._file.check()

    def _read_lines(self) -> tuple[Line, ...]:
        size = self.layout.requests_bytes
        if size > MAX_REQUESTS:
            raise StoreError(f"requests: {size} bytes; the limit is {MAX_REQUESTS}")
        text = bytes(self._file.read("requests", 0, size))
        if text and not text.endswith(b"\n"):
            raise StoreError("requests: the last line has no newline")
        return tuple(read_line(line) for line in text.split(b"\n")[:-1])
