"""Results of requests that wait in the worker until the front end fetches them.

See `protocol.results` for the layout of the data. If the front end maps the arena, large results
stay in it under one lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor, uint8

from midstream.codecs import RowEncoding
from midstream.errors import FetchError
from midstream.runtime.protocol.record_layout import PatternHeader
from midstream.runtime.protocol.results import (
    FunctionCount,
    Lease,
    LeasedSegment,
    RequestHeader,
    ResultHeader,
    RowsHeader,
    ScoresHeader,
)
from midstream.runtime.protocol.runs import joined
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.row_index import ArenaRows, RowBlock
from midstream.runtime.worker.tables.pattern_records import PatternEncoding
from midstream.transport.arena import Arena

INLINE_BYTES = 4 << 20
INLINE_TOTAL = 32 << 20
# (segment, offset within it, number of records) of each run of records.
Places = list[tuple[int, int, int]]
# Fewer bytes are copied, as a lease keeps whole segments in use.
LEASED_BYTES = 1 << 20


class ResultBuffer:
    """Owner of the data between `put` and `release`."""

    def __init__(self, arena: Arena, encoding: Callable[[int], RowEncoding]) -> None:
        """Args:
        arena: memory of the captured rows.
        encoding: returns the encoding with a number.
        """
        self._arena = arena
        self._encoding = encoding
        self._data: dict[str, bytes] = {}
        # Of the latest `inline` of each front end.
        self._inlined: dict[int, set[str]] = {}

    def put(
        self,
        name: str,
        requests: list[RequestState],
        mapped: bool,
        resets: int = 0,
        front_end: int = 0,
    ) -> ResultHeader:
        """Store the results of requests under a name and return their header.

        Args:
            name: name of the data for `inline`, `read` and `release`.
            requests: the requests with their rows, which are copied or leased here.
            mapped: whether the front end maps the arena.
            resets: number of resets of the prefix cache by now.
            front_end: number of the front end, which leases what it maps.
        """
        parts: list[bytes] = []
        entries = []
        every = [block for request in requests for block in request.blocks]
        places = {id(block): _places(block) for block in every}
        lease = self._lease(every, places.values(), front_end) if mapped else None
        for request in requests:
            blocks = []
            scores = []
            parts.append(request.done.tobytes())
            for block in request.blocks:
                where = places[id(block)]
                parts.append(
                    _copied(block, where) if lease is None else np.array(where, np.int64).tobytes()
                )
                blocks.append(
                    RowsHeader(
                        taps=tuple(block.taps),
                        codec=self._encoding(block.codec).codec.spec,
                        runs=joined(block.position, block.length),
                        nbytes=len(parts[-1]),
                        patterns=_patterns(self._encoding(block.codec), request),
                    )
                )
            for read in request.scores:
                parts.append(_bytes(read.values[:, 0, : request.plan.slots]))
                scores.append(ScoresHeader(joined(read.position, read.length), len(parts[-1])))
            entries.append(
                RequestHeader(
                    id=request.id,
                    problem=request.problem,
                    dropped=request.dropped,
                    prompt=request.prompt,
                    turns=request.turns,
                    states=int(request.done.size),
                    rows=blocks,
                    scores=scores,
                    resets=request.resets,
                    functions=[
                        FunctionCount(one.index, one.calls, one.rows) for one in request.functions
                    ],
                    versions=[(one.number, one.position) for one in request.later],
                )
            )
        self._data[name] = b"".join(parts)
        return ResultHeader(name, entries, len(self._data[name]), lease, resets)

    def inline(self, names: list[str], front_end: int = 0) -> list[bytes | None]:
        """Remove and return the data that is small enough to be sent with its header; None for
        data that must be read before the next call of the same front end.
        """
        found: list[bytes | None] = []
        total = 0
        inlined = self._inlined[front_end] = set()
        for name in names:
            size = len(self._data[name])
            if size <= INLINE_BYTES and total + size <= INLINE_TOTAL:
                total += size
                inlined.add(name)
                found.append(self._data.pop(name))
            else:
                found.append(None)
        return found

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of data from `offset` on; no bytes if the data was sent with
        its header. A read is sent to all workers, even if the data of only one was too large.

        Raises:
            FetchError: there is no data under that name.
        """
        is_sent = any(name in names for names in self._inlined.values())
        data = b"" if is_sent else self._data.get(name)
        if data is None:
            raise FetchError(f"the worker has no data for {name}")
        return data[offset : offset + size]

    def release(self, name: str) -> None:
        """Delete the data under a name, if there is any."""
        self._data.pop(name, None)
        for names in self._inlined.values():
            names.discard(name)

    def _lease(
        self, blocks: list[RowBlock[ArenaRows]], places: Iterable[Places], front_end: int
    ) -> Lease | None:
        """Lease the segments of rows, and return the lease; None if the rows must be copied: they
        are few, or the arena permits no more leases.
        """
        nbytes = sum(block.size * _record_bytes(block) for block in blocks)
        if nbytes < LEASED_BYTES:
            return None
        segments = sorted({segment for found in places for segment, _, _ in found})
        number = self._arena.lease(segments)
        if number is None:
            return None
        self._arena.use(segments)
        known = self._arena.describe(segments, front_end)
        return Lease(number, [LeasedSegment(one, *place) for one, place in known.items()])


def _patterns(encoding: RowEncoding, request: RequestState) -> tuple[PatternHeader, ...]:
    """Return the headers of the rows of attention of an encoding."""
    if not isinstance(encoding, PatternEncoding):
        return ()
    captures = request.plan.captures
    return tuple(
        PatternHeader(captures[each.capture].taps[each.place], each.tap, each.nbytes)
        for each in encoding.patterns
        if each.is_row
    )


def _copied(block: RowBlock[ArenaRows], places: Places) -> bytes:
    """Return a copy of the rows, which must be on the host."""
    arena, size = block.sources[0].arena, _record_bytes(block)
    memory = {
        segment: arena.memory_of(segment).numpy().data
        for segment in {segment for segment, _, _ in places}
    }
    return b"".join([memory[segment][begin : begin + size * n] for segment, begin, n in places])


def _places(block: RowBlock[ArenaRows]) -> Places:
    """Return the places of the rows. Blocks until the rows are on the host, as a reader that maps
    them cannot wait for them.
    """
    width = _row_bytes(block)
    places = []
    waited = None
    for nth, first, records in block.runs():
        stored = block.sources[nth]
        if nth != waited:
            stored.shipment.wait()
            waited = nth
        extent = stored.extent
        places.append((extent.segment, extent.offset + first * width, records))
    return places


def _row_bytes(block: RowBlock[ArenaRows]) -> int:
    return block.sources[int(block.source[0])].row_bytes


def _record_bytes(block: RowBlock[ArenaRows]) -> int:
    return block.rows * _row_bytes(block)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(uint8).numpy().tobytes()
