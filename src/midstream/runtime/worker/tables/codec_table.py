"""Encodings of a worker's captured rows, each with a number."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.codecs import Raw, RowEncoding, parse_codec
from midstream.plan.resolved import LensMap, Pattern
from midstream.runtime.protocol.segments import PatternRead
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding


class CodecTable:
    """The encodings that requests have used since the worker started; number 0 is `raw`."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        raw = RowEncoding.of(Raw(), (), buffers.unit)
        self._encodings = [raw]
        self._row_bytes = [raw.row_bytes(buffers.ring.dtype)]
        self._numbers = {raw: 0}

    def number(self, spec: str, taps: Sequence[int]) -> int:
        """Return the number of the encoding of records with these taps, in order."""
        widths = [self._buffers.width(tap) for tap in taps]
        return self._number(RowEncoding.of(parse_codec(spec), widths, self._buffers.unit))

    def pattern_number(
        self,
        spec: str,
        taps: Sequence[int],
        returned: Sequence[int],
        patterns: Sequence[PatternRead],
    ) -> int:
        """Return the number of the encoding of records with queries, of which some taps return."""
        width, start = self._buffers.width, 0
        starts = {}
        for tap in taps:
            starts[tap] = start
            start += width(tap)
        columns = tuple(
            PatternColumns(
                read.capture,
                read.place,
                read.tap,
                starts[read.tap],
                width(read.tap),
                read.pattern.kind,
                read.pattern.size,
                read.heads,
                read.num_heads,
                read.is_row,
                read.slot,
                1 if read.slot is None else read.pattern.counts[0],
                _map_of(read.pattern, read.place),
                read.pattern.encoder,
            )
            for read in patterns
        )
        vectors = tuple((starts[tap], width(tap)) for tap in returned)
        units = self.units_of(taps)
        return self._number(PatternEncoding(parse_codec(spec), (), units, vectors, columns))

    def _number(self, encoding: RowEncoding) -> int:
        number = self._numbers.get(encoding)
        if number is None:
            # Encoding no rows allocates what the codec needs on the device, before a step needs it.
            if not isinstance(encoding, PatternEncoding):
                encoding.encode(self._buffers.ring[:0])
            self._row_bytes.append(encoding.row_bytes(self._buffers.ring.dtype))
            self._encodings.append(encoding)
            number = self._numbers[encoding] = len(self._encodings) - 1
        return number

    def in_order(self, taps: Sequence[int]) -> tuple[int, ...]:
        """Return taps in the order of a record: those of one width are neighbours."""
        return tuple(sorted(taps, key=lambda tap: (self._buffers.units[tap], tap)))

    def units_of(self, taps: Sequence[int]) -> int:
        """Return the number of ring units of a record of some taps."""
        return sum(self._buffers.units[tap] for tap in taps)

    def encoding(self, number: int) -> RowEncoding:
        return self._encodings[number]

    def row_bytes(self, number: int) -> int:
        return self._row_bytes[number]


def _map_of(pattern: Pattern, place: int) -> LensMap | None:
    """Return the map of the stream that a tap is read with; None: it is not the stream."""
    if pattern.maps:
        return pattern.maps[place]
    return LensMap() if pattern.kind == "lens" else None
