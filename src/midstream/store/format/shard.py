"""Reader of one shard: checks the header and checksums, and reads rows in place."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.backends.base import File, Folder
from midstream.store.format.checksums import JOB, block_sums, in_parallel
from midstream.store.format.entry import Header
from midstream.store.format.layout import (
    ALIGNMENT,
    BLOCK,
    MAX_REQUESTS,
    Group,
    header_length,
    read_head,
    tap_name,
    tap_order,
)
from midstream.store.format.lines import Line, read_line, read_metadata
from midstream.validation import show

_DTYPES: dict[str, Any] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}


@dataclass(frozen=True, slots=True)
class Run:
    """The rows [start, stop) of a group, which belong to one request."""

    group: int
    start: int
    stop: int


class Shard:
    """A shard whose header and list of requests were checked.

    Every block of 64 KiB is compared with its checksum before it is first used, so that all data
    returned is exactly what was written.

    Attributes:
        name: name of its file.
        size: length of its file in bytes.
        header: what all rows share.
        head_bytes: number of bytes before its first tensor.
        layout: the contents of its header.
        lines: its completions, in the order in which they were added.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        """Open a shard: read and check its header, checksums and list of requests.

        Raises:
            StoreError: the file is damaged, has an unknown version or is not a shard. The message
                begins with its path.
        """
        self.name = name
        self._folder = folder
        with self._named():
            file = folder.open(name)
            self.size = file.size
            length = header_length(bytes(file.read(0, min(8, file.size))), file.size)
            head = bytes(file.read(0, 8 + length))
            self.layout = read_head(head, file.size)
            if name in self.layout.replaces:
                raise StoreError("replaces: the shard lists itself")
            self.header: Header = self.layout.header
            self.head_bytes = len(head)
            self._places = self.layout.places()
            self._sums = self._read_sums(file, head)
            self._verified = np.zeros(len(self._sums), np.bool_)
            self.lines: tuple[Line, ...] = self._read_lines()
            self._runs, self._metadata = self._locate()
            self._owners = _owners(self._runs, len(self.groups))

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {len(self.lines)} requests)"

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of taps that share an index."""
        return self.layout.groups

    @property
    def path(self) -> str:
        """The shard's path or URL, for messages."""
        return f"{self._folder}/{self.name}"

    def owners(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the requests of a group's rows: (request indices int64 [m], row bounds [m + 1]).

        Rows bounds[i] to bounds[i + 1] belong to request i of the m.
        """
        return self._owners[group]

    def taps(self, request: int) -> tuple[Tap, ...]:
        """Return the taps of a request by index, including taps without rows."""
        every = (tap for run in self._runs[request] for tap in self.groups[run.group].taps)
        return tuple(sorted(every, key=tap_order))

    def runs(self, request: int) -> tuple[Run, ...]:
        """Return the runs of a request by index, by ascending group."""
        return self._runs[request]

    def metadata(self, request: int) -> dict[str, Any]:
        """Return the metadata of a request by index. Raises StoreError if it is damaged."""
        with self._named():
            return read_metadata(self.metadata_text(request))

    def metadata_text(self, request: int) -> bytes:
        """Return the metadata of a request as stored: a line of JSON."""
        start, stop = self._metadata[request]
        with self._named():
            return bytes(self._read("metadata", start, stop))

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes of the file in order."""
        file = self._file()
        for start in range(0, self.size, JOB):
            yield file.read(start, min(start + JOB, self.size))

    def column(
        self, group: int, name: str, start: int = 0, stop: int | None = None
    ) -> NDArray[Any]:
        """Return rows [start, stop) of a group's index column, as a read-only view of the file.

        Args:
            group: the group's number.
            name: "position" or "token_id", int64 [rows]; "request", int32 [rows].
            start: the first row.
            stop: the end, exclusive; None for all.

        Raises:
            StoreError: the column is damaged.
        """
        place = self._places[f"g{group}.{name}"]
        dtype = _DTYPES[place.dtype]
        stop = place.shape[0] if stop is None else stop
        with self._named():
            part = self._read(f"g{group}.{name}", start * dtype.itemsize, stop * dtype.itemsize)
        return np.frombuffer(part, dtype)

    def rows(self, group: int, tap: Tap, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows [start, stop) of a tap, uint8 [n, row_bytes], as a read-only view.

        Raises StoreError if they are damaged.
        """
        name = tap_name(group, tap)
        width = self._places[name].shape[1]
        with self._named():
            part = self._read(name, start * width, stop * width)
        return np.frombuffer(part, np.uint8).reshape(stop - start, width)

    def gather(self, group: int, tap: Tap, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Copy rows of a tap by index to uint8 [n, row_bytes], in the order of `rows`.

        Raises:
            StoreError: the rows are damaged.
        """
        place = self._places[tap_name(group, tap)]
        width = place.shape[1]
        with self._named():
            self._check_rows(place.start + rows * width, width)
            return self._file().gather(self.head_bytes + place.start, width, rows)

    def check(self) -> None:
        """Compare every block with its checksum.

        Raises:
            StoreError: a block is damaged.
        """
        with self._named():
            self._check(0, len(self._sums))

    # ---------------------------------------------------------------- opening

    def _read_sums(self, file: File, head: bytes) -> NDArray[np.uint32]:
        """Return the checksum of each data block."""
        place = self._places["checksums"]
        words = np.frombuffer(
            bytes(file.read(self.head_bytes + place.start, self.head_bytes + place.stop)), "<u4"
        )
        if zlib.crc32(words[:-1].tobytes()) != words[-1]:
            raise StoreError("damaged: the list of checksums does not match its own checksum")
        if zlib.crc32(head) != words[0]:
            raise StoreError("damaged: the header does not match its checksum")
        return words[1:-1]

    def _read_lines(self) -> tuple[Line, ...]:
        size = self.layout.requests_bytes
        if size > MAX_REQUESTS:
            raise StoreError(f"requests: {size} bytes; the limit is {MAX_REQUESTS}")
        text = bytes(self._read("requests", 0, size))
        if text and not text.endswith(b"\n"):
            raise StoreError("requests: the last line has no newline")
        return tuple(read_line(line) for line in text.split(b"\n")[:-1])

    def _locate(self) -> tuple[list[tuple[Run, ...]], list[tuple[int, int]]]:
        """Return the runs of rows and the byte range of the metadata of each request."""
        ends = [0] * len(self.groups)
        seen: set[tuple[str, int]] = set()
        runs = []
        metadata = []
        text = 0
        for line in self.lines:
            known = line.request, line.child
            if known in seen:
                raise StoreError(f"request {show(line.request)}: listed twice")
            seen.add(known)
            runs.append(tuple(self._next_runs(line, ends)))
            metadata.append((text, text + line.metadata_bytes))
            text += line.metadata_bytes
        for number, group in enumerate(self.groups):
            if ends[number] != group.rows:
                raise StoreError(
                    f"group {number}: {group.rows} rows, but the requests list {ends[number]}"
                )
        if not 0 <= self.layout.metadata_bytes - text < ALIGNMENT:
            raise StoreError(
                f"metadata: {self.layout.metadata_bytes} bytes, but the requests list {text}"
            )
        return runs, metadata

    def _next_runs(self, line: Line, ends: list[int]) -> Iterator[Run]:
        taps: set[Tap] = set()
        for group, count in line.rows:
            if group >= len(ends):
                raise StoreError(f"request {show(line.request)}: there is no group {group}")
            if not taps.isdisjoint(self.groups[group].taps):
                raise StoreError(f"request {show(line.request)}: a tap has rows in two groups")
            taps.update(self.groups[group].taps)
            yield Run(group, ends[group], ends[group] + count)
            ends[group] += count

    # ---------------------------------------------------------------- reading

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Prefix StoreErrors of the block with the shard's path, unless they start with it."""
        try:
            yield
        except StoreError as error:
            if str(error).startswith(self.path):
                raise
            raise StoreError(f"{self.path}: {error}") from error.__cause__

    def _file(self) -> File:
        try:
            file = self._folder.open(self.name)
        except StoreError as error:
            raise StoreError(f"{error}; the shard was removed, call `refresh`") from error
        if file.size != self.size:
            raise StoreError(f"the file changed: expected {self.size} bytes, got {file.size}")
        return file

    def _read(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a tensor after checking their checksums."""
        first = self._places[name].start
        start, stop = first + start, first + stop
        if stop > start:
            self._check(start // BLOCK, -(-stop // BLOCK))
        return self._file().read(self.head_bytes + start, self.head_bytes + stop)

    def _check(self, start: int, stop: int) -> None:
        """Compare blocks [start, stop) with their checksums, unless all were checked before."""
        if self._verified[start:stop].all():
            return
        file = self._file()
        end = self._places["checksums"].start

        def sums(first: int, last: int) -> list[int]:
            return block_sums([file.read(self.head_bytes + first, self.head_bytes + last)])

        found = np.fromiter(
            (
                one
                for part in in_parallel(sums, start * BLOCK, min(stop * BLOCK, end))
                for one in part
            ),
            np.uint32,
        )
        wrong = np.flatnonzero(found != self._sums[start:stop])
        if len(wrong):
            raise StoreError(self._damage(start + int(wrong[0])))
        self._verified[start:stop] = True

    def _check_rows(self, starts: NDArray[np.int64], width: int) -> None:
        """Check the blocks of rows of `width` bytes, which begin at `starts`."""
        first, last = starts // BLOCK, (starts + width - 1) // BLOCK
        if width <= BLOCK and self._verified[first].all() and self._verified[last].all():
            return
        depth = np.zeros(len(self._verified) + 1, np.int64)
        np.add.at(depth, first, 1)
        np.add.at(depth, last + 1, -1)
        unknown = np.flatnonzero((depth.cumsum()[:-1] > 0) & ~self._verified)
        for run in np.split(unknown, np.flatnonzero(np.diff(unknown) > 1) + 1):
            if len(run):
                self._check(int(run[0]), int(run[-1]) + 1)

    def _damage(self, block: int) -> str:
        """Return the error message for a damaged block."""
        start, stop = block * BLOCK, (block + 1) * BLOCK
        names = [
            name
            for name, place in self._places.items()
            if place.start < stop and place.stop > start and name != "checksums"
        ]
        return (
            f"damaged: {', '.join(names[:3])}{'' if len(names) <= 3 else ' …'} "
            f"does not match its checksum, near byte {self.head_bytes + start}"
        )


def _owners(
    runs: Sequence[Sequence[Run]], groups: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the result of `Shard.owners` for each group."""
    owners: list[list[int]] = [[] for _ in range(groups)]
    bounds: list[list[int]] = [[0] for _ in range(groups)]
    for request, every in enumerate(runs):
        for run in every:
            owners[run.group].append(request)
            bounds[run.group].append(run.stop)
    return [
        (np.array(who, np.int64), np.array(where, np.int64))
        for who, where in zip(owners, bounds, strict=True)
    ]
