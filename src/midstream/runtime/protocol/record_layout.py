"""Layout of the records of captured rows: which rows of which width, in which order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby

import torch

from midstream.codecs import Codec, Raw, parse_codec
from midstream.errors import MessageError, MidstreamError
from midstream.results.encoded_rows import Chunk, Scattered
from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.sites import Tap


class PatternHeader(ProtocolMessage, frozen=True, array_like=True):
    """A row of attention in each record of a block, after its captured rows."""

    tap: Tap
    queries: Natural  # index of the worker's tap at which they were read
    nbytes: Natural


@dataclass(frozen=True, slots=True)
class RecordPart:
    """The rows of one width in a record, from the byte `start` on. `parts`: see `ResultBlock`."""

    start: int
    taps: tuple[Tap, ...]
    row_bytes: int
    codec: Codec
    parts: int

    @property
    def nbytes(self) -> int:
        return len(self.taps) * self.row_bytes

    def of(self, records: Chunk) -> Chunk:
        """Return these rows of some records, [records, taps, bytes of a row]."""
        count = len(self.taps)
        if isinstance(records, Scattered):
            offsets = records.offsets + self.start if self.start else records.offsets
            return Scattered(records.memory, offsets, count, self.row_bytes)
        if self.nbytes < records.shape[2]:
            records = records[:, 0, self.start : self.start + self.nbytes]
        return records.view(-1, count, self.row_bytes)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """What the records of a block, of `nbytes` each, consist of: the rows of each width."""

    parts: tuple[RecordPart, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A block without its rows, as requests with the same outline have it."""

    nth: int  # index of its header among those of the worker
    part: RecordPart  # the rows of a record, which has no others
    positions: Ints


@functools.lru_cache(maxsize=256)
def layout_of(
    worker: WorkerInfo, indices: tuple[int, ...], spec: str, patterns: tuple[PatternHeader, ...]
) -> RecordLayout:
    """Return the layout that the fields of a `RowsHeader` describe, of which there are few."""
    names = worker.taps
    if any(index >= len(names) for index in (*indices, *(pattern.queries for pattern in patterns))):
        raise MessageError(f"taps {indices} of {len(names)}")
    dtype = getattr(torch, worker.dtype)
    parts: list[RecordPart] = []
    nbytes = 0
    try:
        codec = parse_codec(spec)
        forms = groupby(indices, lambda tap: (worker.widths[tap], worker.parts[tap]))
        for (width, split), same in forms:
            taps = tuple([names[tap] for tap in same])
            parts.append(RecordPart(nbytes, taps, codec.row_bytes(width, dtype), codec, split))
            nbytes += parts[-1].nbytes
    except MidstreamError as error:
        raise MessageError(f"codec {spec!r}: {error}") from None
    for pattern in patterns:
        split = worker.parts[pattern.queries]
        parts.append(RecordPart(nbytes, (pattern.tap,), pattern.nbytes, Raw(), split))
        nbytes += pattern.nbytes
    return RecordLayout(tuple(parts), nbytes)
