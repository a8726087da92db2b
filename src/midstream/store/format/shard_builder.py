"""Builder of one shard from entries, which it references without copying."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.format.checksums import Summing, seal
from midstream.store.format.entry import Entry, Header, check_number, check_text
from midstream.store.format.entry_rows import IndexedRows, read_rows
from midstream.store.format.layout import (
    MAX_HEADER,
    MAX_POSITION,
    MAX_REQUESTS,
    Group,
    Layout,
    group_bytes,
    padding,
)
from midstream.store.format.lines import MAX_CHILD, Line, emit_metadata
from midstream.validation import show

# Far below the limit of a header, so that one more entry always fits.
_MANY_TENSORS = MAX_HEADER // 512


@dataclass(slots=True)
class _Column:
    number: int
    requests: list[int] = field(default_factory=list)
    parts: list[IndexedRows] = field(default_factory=list)
    rows: int = 0


class ShardBuilder:
    """The entries of one shard, whose tensors must not change until it is written."""

    def __init__(self, header: Header, replaces: Sequence[str] = ()) -> None:
        self.header = header
        self.nbytes = 0  # of everything before the padding
        self._replaces = tuple(replaces)
        self._columns: dict[tuple[Tap, ...], _Column] = {}
        self._tensors = 0
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._metadata: list[bytes] = []
        self._known: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def requests(self) -> set[str]:
        return {request for request, _ in self._known}

    @property
    def full(self) -> bool:
        """Whether the next entry should start another shard, regardless of this one's length."""
        return self._tensors >= _MANY_TENSORS or self._lines_bytes >= MAX_REQUESTS // 2

    def read(self, entry: Entry) -> tuple[Line, bytes, list[IndexedRows]]:
        if not isinstance(entry, Entry):
            raise StoreError(f"expected `Entry`, got `{type(entry).__name__}`")
        check_text("request", entry.request, least=1)
        try:
            metadata = emit_metadata(entry.metadata)
            line = Line(
                entry.request,
                check_number("child", entry.child, 0, MAX_CHILD),
                check_text("tag", entry.tag),
                check_number("prompt_tokens", entry.prompt_tokens, 0, MAX_POSITION + 1),
                (),
                len(metadata),
            )
            return line, metadata, read_rows(entry.taps, self.header.row_bytes)
        except StoreError as error:
            raise StoreError(f"request {show(entry.request)}: {error}") from None

    def add(self, line: Line, metadata: bytes, rows: Sequence[IndexedRows]) -> None:
        """Add one completion; `rows` of its line is computed here."""
        known = line.request, line.child
        if known in self._known:
            raise StoreError(
                f"request {show(line.request)}: completion {line.child} was added before"
            )
        counts = []
        for part in rows:
            taps, count = tuple(part.data), len(part.positions)
            column = self._columns.get(taps)
            if column is None:
                column = self._columns[taps] = _Column(len(self._columns))
                self._tensors += 3 + len(taps)
            column.requests.append(len(self._lines))
            column.parts.append(part)
            column.rows += count
            counts.append((column.number, count))
            self.nbytes += group_bytes(Group(taps, count), self.header)
        text = replace(line, rows=tuple(sorted(counts))).emit()
        self._lines.append(text)
        self._lines_bytes += len(text)
        self._metadata.append(metadata)
        self._known.add(known)
        self.nbytes += len(text) + len(metadata)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the shard's bytes in order, without copying the rows."""
        head = self._layout().head()
        if len(head) > MAX_HEADER:
            raise StoreError(f"header of {len(head)} bytes; the limit is {MAX_HEADER}")
        summing = Summing()
        try:
            yield memoryview(head)
            for part in self._parts():
                piece = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                summing.add(piece)
                yield piece
            yield seal([zlib.crc32(head), *summing.finish()]).view(np.uint8).data
        finally:
            summing.close()

    def _layout(self) -> Layout:
        groups = tuple(Group(taps, column.rows) for taps, column in self._columns.items())
        metadata = sum(map(len, self._metadata)) + padding(self.nbytes)
        present = {tap for group in groups for tap in group.taps}
        # Rows of the same taps make the same shard, whatever taps the engine has.
        widths = tuple(tap_width for tap_width in self.header.widths if tap_width[0] in present)
        header = replace(self.header, widths=widths)
        return Layout(header, groups, self._lines_bytes, metadata, self._replaces)

    def _parts(self) -> Iterator[NDArray[Any]]:
        """Yield all tensors except the checksums, in the order of `Layout.places`."""
        columns = self._columns.values()
        # Concatenated: index arrays are small and may be many.
        for column in columns:
            yield np.concatenate([part.positions for part in column.parts])
        for column in columns:
            yield np.concatenate([part.token_ids for part in column.parts])
        for column in columns:
            lengths = [len(part.positions) for part in column.parts]
            yield np.repeat(np.array(column.requests, np.int32), lengths)
        for taps, column in self._columns.items():
            for tap in taps:
                yield from (part.data[tap] for part in column.parts)
        yield np.frombuffer(b"".join(self._lines), np.uint8)
        yield np.frombuffer(b"".join(self._metadata) + b" " * padding(self.nbytes), np.uint8)
