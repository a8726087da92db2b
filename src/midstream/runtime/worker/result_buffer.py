"""Results of requests that wait in the worker, laid out as in `protocol.results`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

import numpy as np

from midstream.codecs import RowEncoding
from midstream.errors import FetchError
from midstream.runtime.protocol import results as protocol
from midstream.runtime.protocol.record_layout import PatternHeader
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.row_block import RowBlock
from midstream.runtime.worker.row_index import ArenaRows
from midstream.runtime.worker.tables.pattern_records import PatternEncoding
from midstream.transport.arena import Arena
from midstream.transport.base import Shipment

INLINE_BYTES = 4 << 20
INLINE_TOTAL = 32 << 20
# (segment, offset within it, number of records) of each run of records.
Places = list[tuple[int, int, int]]
Placed = tuple[Places, int]  # and the bytes of all rows
# Fewer bytes are copied, as a lease keeps whole segments in use.
LEASED_BYTES = 1 << 20


class ResultBuffer:
    """Owner of the data between `put` and `release`."""

    def __init__(self, arena: Arena, encoding: Callable[[int], RowEncoding]) -> None:
        self._arena = arena
        self._encoding = encoding
        self._data: dict[str, bytes] = {}
        # Of the latest `inline` of each front end.
        self._inlined: dict[int, set[str]] = {}

    def put(
        self,
        results: Mapping[str, list[RequestState]],
        mapped: bool,
        resets: int = 0,
        front_end: int = 0,
    ) -> list[protocol.ResultHeader]:
        """Store requests' results under names; return their headers. Rows are copied, or leased."""
        placer = _Placer()
        leases: dict[tuple[int, ...], protocol.Lease] = {}
        headers = []
        for name, requests in results.items():
            parts: list[bytes | memoryview] = []
            placed = [[placer.place(block) for block in request.blocks] for request in requests]
            lease = self._lease(placed, front_end, leases) if mapped else None
            entries = [
                self._entry(request, placed[index], parts, placer if lease is None else None)
                for index, request in enumerate(requests)
            ]
            data = self._data[name] = b"".join(parts)
            headers.append(protocol.ResultHeader(name, entries, len(data), lease, resets))
        return headers

    def _entry(
        self,
        request: RequestState,
        placed: list[Placed],
        parts: list[bytes | memoryview],
        reads: _Placer | None,
    ) -> protocol.RequestHeader:
        """Return a request's header, and add its data to `parts`; rows stay if `reads` is None."""
        parts.append(request.done.tobytes())
        blocks = []
        for index, block in enumerate(request.blocks):
            places, nbytes = placed[index]
            if reads is None:
                parts.append(array("q", [number for place in places for number in place]).tobytes())
                nbytes = len(parts[-1])
            else:
                parts += reads.rows(block, places, nbytes)
            encoding = self._encoding(block.codec)
            spec, patterns = encoding.codec.spec, _patterns(encoding, request)
            blocks.append(protocol.RowsHeader(block.taps, spec, block.spans, nbytes, patterns))
        scores = []
        for read in request.scores:
            parts.append(read.values[:, : request.plan.slots].tobytes())
            scores.append(protocol.ScoresHeader(read.spans, len(parts[-1])))
        doses = []
        for sums in request.doses:
            latest = np.column_stack((sums.positions, sums.latest)).astype(np.float64)
            parts += [sums.totals.tobytes(), latest.tobytes()]
            doses.append(
                protocol.DosesHeader(sums.version, sums.totals.shape[1], sums.positions.size)
            )
        return protocol.RequestHeader(
            id=request.id,
            problem=request.problem,
            dropped=request.dropped,
            prompt=request.prompt,
            turns=request.turns,
            states=request.done.size,
            rows=blocks,
            scores=scores,
            resets=request.resets,
            functions=[
                protocol.FunctionCount(function.index, function.calls, function.rows)
                for function in request.functions
            ],
            versions=[(version.number, version.position) for version in request.later],
            doses=doses,
            weights=request.weights,
        )

    def inline(self, names: list[str], front_end: int = 0) -> list[bytes | None]:
        """Remove and return data that is sent with its header; None: the front end must read it."""
        data: list[bytes | None] = []
        total = 0
        inlined = self._inlined[front_end] = set()
        for name in names:
            size = len(self._data[name])
            if size <= INLINE_BYTES and total + size <= INLINE_TOTAL:
                total += size
                inlined.add(name)
                data.append(self._data.pop(name))
            else:
                data.append(None)
        return data

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of data from `offset` on; none if sent with its header."""
        is_sent = any(name in names for names in self._inlined.values())
        data = b"" if is_sent else self._data.get(name)  # a read is sent to all workers
        if data is None:
            raise FetchError(f"the worker has no data for {name}")
        return data[offset : offset + size]

    def release(self, name: str) -> None:
        """Delete the data under a name, if there is any."""
        self._data.pop(name, None)
        for names in self._inlined.values():
            names.discard(name)

    def _lease(
        self,
        placed: list[list[Placed]],
        front_end: int,
        leases: dict[tuple[int, ...], protocol.Lease],
    ) -> protocol.Lease | None:
        """Lease the segments of rows; None if these must be copied: few, or no lease is left."""
        blocks = [block for mine in placed for block in mine]
        if sum([nbytes for _, nbytes in blocks]) < LEASED_BYTES:
            return None
        segments = tuple(sorted({segment for places, _ in blocks for segment, _, _ in places}))
        lease = leases.get(segments)
        if lease is None:
            number = self._arena.lease(list(segments))
            if number is None:
                return None
            self._arena.use(segments)
            known = self._arena.describe(segments, front_end)
            lease = protocol.Lease(
                number,
                [protocol.LeasedSegment(segment, *place) for segment, place in known.items()],
            )
            leases[segments] = lease
        return lease


class _Placer:
    """Finds and reads rows in the arena, once they are on the host: who maps them cannot wait."""

    def __init__(self) -> None:
        self._awaited: Shipment | None = None
        self._memory: dict[tuple[Arena, int], memoryview] = {}

    def place(self, block: RowBlock[ArenaRows]) -> Placed:
        """Return the places of the rows, and their bytes. Blocks until they are on the host."""
        places = []
        nbytes = 0
        for _, records, source, first in block.runs:
            stored = block.sources[source]
            if stored.shipment is not self._awaited:
                self._awaited = stored.shipment
                stored.shipment.wait()
            extent, width = stored.extent, stored.row_bytes
            places.append((extent.segment, extent.offset + first * width, records))
            nbytes += records * block.rows * width
        return places, nbytes

    def rows(
        self, block: RowBlock[ArenaRows], places: Places, nbytes: int
    ) -> list[bytes | memoryview]:
        """Return the rows of a block, which are `nbytes` bytes at some places."""
        record = nbytes // block.size
        arena = block.sources[0].arena
        return [
            self._memory_of(arena, segment)[begin : begin + record * records]
            for segment, begin, records in places
        ]

    def _memory_of(self, arena: Arena, segment: int) -> memoryview:
        memory = self._memory.get((arena, segment))
        if memory is None:
            memory = arena.memory_of(segment).numpy().data
            self._memory[arena, segment] = memory
        return memory


def _patterns(encoding: RowEncoding, request: RequestState) -> tuple[PatternHeader, ...]:
    if not isinstance(encoding, PatternEncoding):
        return ()
    captures = request.plan.captures
    return tuple(
        PatternHeader(captures[pattern.capture].taps[pattern.place], pattern.tap, pattern.nbytes)
        for pattern in encoding.patterns
        if pattern.is_row
    )
