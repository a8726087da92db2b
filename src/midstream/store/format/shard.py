"""Reader of one shard, a safetensors file whose every offset is checked: files are untrusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.backends.base import File, Folder
from midstream.store.format.checked_file import CheckedFile
from midstream.store.format.entry import Header
from midstream.store.format.layout import (
    ALIGNMENT,
    MAX_REQUESTS,
    Group,
    Layout,
    tap_name,
    tap_order,
)
from midstream.store.format.lines import Line, dump, read_line, read_metadata
from midstream.validation import show

_DTYPES: dict[str, Any] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
# Of a group: (request indices int64 [m], row bounds int64 [m + 1]).
Owners = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Run:
    """The rows [start, stop) of a group, which belong to one request."""

    group: int
    start: int
    stop: int


class RequestIndex:
    """Rows and metadata of each request of a shard."""

    def __init__(self, layout: Layout, lines: Sequence[Line]) -> None:
        self._groups = layout.groups
        self.runs: list[tuple[Run, ...]] = []  # of each request, by ascending group
        self.metadata: list[tuple[int, int]] = []  # each request's bytes [start, stop)
        ends = [0] * len(self._groups)
        seen: set[tuple[str, int]] = set()
        text = 0
        for line in lines:
            known = line.request, line.child
            if known in seen:
                raise StoreError(f"request {show(line.request)}: listed twice")
            seen.add(known)
            self.runs.append(tuple(self._next_runs(line, ends)))
            self.metadata.append((text, text + line.metadata_bytes))
            text += line.metadata_bytes
        for number, group in enumerate(self._groups):
            if ends[number] != group.rows:
                raise StoreError(
                    f"group {number}: {group.rows} rows, but the requests list {ends[number]}"
                )
        if not 0 <= layout.metadata_bytes - text < ALIGNMENT:
            raise StoreError(
                f"metadata: {layout.metadata_bytes} bytes, but the requests list {text}"
            )
        groups = len(layout.groups)
        owners: list[list[int]] = [[] for _ in range(groups)]
        bounds: list[list[int]] = [[0] for _ in range(groups)]
        for request, every in enumerate(self.runs):
            for run in every:
                owners[run.group].append(request)
                bounds[run.group].append(run.stop)
        self.owners = [
            (np.array(who, np.int64), np.array(where, np.int64))
            for who, where in zip(owners, bounds, strict=True)
        ]

    def _next_runs(self, line: Line, ends: list[int]) -> Iterator[Run]:
        """Yield a request's runs, and advance the ends of their groups."""
        taps: set[Tap] = set()
        for group, count in line.rows:
            if group >= len(ends):
                raise StoreError(f"request {show(line.request)}: there is no group {group}")
            if not taps.isdisjoint(self._groups[group].taps):
                raise StoreError(f"request {show(line.request)}: a tap has rows in two groups")
            taps.update(self._groups[group].taps)
            yield Run(group, ends[group], ends[group] + count)
            ends[group] += count


class Shard(CheckedFile):
    """A shard whose header and list of requests were checked too."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__(folder, name)
        self.header: Header = self.layout.header
        self.groups: tuple[Group, ...] = self.layout.groups
        with self.named():
            self.lines: tuple[Line, ...] = self._read_lines()
            self._index = RequestIndex(self.layout, self.lines)

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {len(self.lines)} requests)"

    def owners(self, group: int) -> Owners:
        """Return the requests of a group's rows."""
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
        with self.named():
            return read_metadata(self.metadata_text(request))

    def metadata_text(self, request: int) -> bytes:
        """Return the metadata of a request as stored: a line of JSON."""
        return bytes(self.read("metadata", *self._index.metadata[request]))

    def metadata_with(self, field: str) -> Iterator[tuple[int, Any]]:
        """Yield the value of a field of the metadata of each request that has it, by index."""
        places = self._index.metadata
        text = bytes(self.read("metadata", 0, places[-1][1])) if places else b""
        mark = dump(field)[:-1]
        for request, (start, stop) in enumerate(places):
            if text.find(mark, start, stop) >= 0:
                with self.named():
                    metadata = read_metadata(text[start:stop])
                if field in metadata:
                    yield request, metadata[field]

    def column(
        self, group: int, name: str, start: int = 0, stop: int | None = None
    ) -> NDArray[Any]:
        """Return rows of a group's "position", "token_id" (int64) or "request" (int32) in place."""
        tensor = f"g{group}.{name}"
        place = self.places[tensor]
        dtype = _DTYPES[place.dtype]
        stop = place.shape[0] if stop is None else stop
        part = self.read(tensor, start * dtype.itemsize, stop * dtype.itemsize)
        return np.frombuffer(part, dtype)

    def rows(self, group: int, tap: Tap, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows of a tap, uint8 [n, row_bytes], read-only. StoreError: they are damaged."""
        tensor = tap_name(group, tap)
        width = self.places[tensor].shape[1]
        part = self.read(tensor, start * width, stop * width)
        return np.frombuffer(part, np.uint8).reshape(stop - start, width)

    def gather(
        self, group: int, tap: Tap, rows: NDArray[np.int64], checked: bool = True
    ) -> NDArray[np.uint8]:
        """Copy rows of a tap by index; see `CheckedFile.gather_rows`."""
        return self.gather_rows(tap_name(group, tap), rows, checked)

    def locate(
        self, taps: Sequence[tuple[int, Tap]], rows: Sequence[NDArray[np.int64]]
    ) -> tuple[File, NDArray[np.int64]]:
        """Return where rows of taps, each with its group, are; see `CheckedFile.locate_rows`."""
        return self.locate_rows([tap_name(*tap) for tap in taps], rows)

    def prepare(
        self, group: int, tap: Tap, rows: NDArray[np.int64], checked: bool, again: bool
    ) -> None:
        """Have the system read rows of a tap; see `CheckedFile.prepare_rows`."""
        self.prepare_rows(tap_name(group, tap), rows, checked, again)

    def _read_lines(self) -> tuple[Line, ...]:
        size = self.layout.requests_bytes
        if size > MAX_REQUESTS:
            raise StoreError(f"requests: {size} bytes; the limit is {MAX_REQUESTS}")
        text = bytes(self.read("requests", 0, size))
        if text and not text.endswith(b"\n"):
            raise StoreError("requests: the last line has no newline")
        return tuple(read_line(line) for line in text.split(b"\n")[:-1])
