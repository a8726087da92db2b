"""Captured rows of ended requests, by the tokens and edits that they were computed from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from midstream.sites import Tap

# Tokens whose rows are kept under one key: vLLM's smallest usual block. It need not be vLLM's.
CHUNK = 16
# Sets of rows of one chunk, of captures with different layers, sites or positions.
_MOST_SETS = 8


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Rows of some taps at the same positions of one chunk. Nobody may change them."""

    taps: tuple[Tap, ...]  # in the order within a record
    codec: str
    offsets: int  # bit n: there is a row of the chunk's nth position
    rows: Tensor  # uint8 [positions, taps, bytes of a row], ascending by position
    rank: int = 0

    def has(self, offsets: int, codec: str) -> bool:
        """Return whether there is a row at each of these offsets, in this encoding."""
        return self.codec == codec and not offsets & ~self.offsets

    def includes(self, other: RowSet) -> bool:
        return self.has(other.offsets, other.codec) and set(other.taps) <= set(self.taps)


@dataclass(slots=True)
class _Chunk:
    sets: list[RowSet] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(row_set.rows.nbytes for row_set in self.sets)


class RowStore:
    """Rows by chunk of tokens, of which the least recently used are dropped. Thread-safe. A key is
    a hash of tokens, edits and the chunk before, so that equal keys mean equal rows.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget  # most bytes of rows
        self.used = 0  # bytes of rows
        self.resets = 0  # of the prefix cache; rows of before the last one are dropped
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def find(
        self, key: bytes, taps: Sequence[Tap], offsets: int, codec: str
    ) -> list[tuple[RowSet, tuple[Tap, ...]]] | None:
        """Return sets with these rows of all of some taps, each with those to read from it."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                return None
            matches = []
            left = list(taps)
            for row_set in chunk.sets:
                mine = set(row_set.taps).intersection(left) if row_set.has(offsets, codec) else ()
                if mine:
                    matches.append((row_set, tuple(tap for tap in left if tap in mine)))
                    left = [tap for tap in left if tap not in mine]
            return None if left else matches

    def has(self, key: bytes, taps: Sequence[Tap], offsets: int, codec: str) -> bool:
        return self.find(key, taps, offsets, codec) is not None

    def use(self, keys: Sequence[bytes]) -> None:
        """Count the chunks of a request as used now, its first tokens last: others need these."""
        with self._lock:
            for key in reversed(keys):
                if key in self._chunks:
                    self._chunks.move_to_end(key)

    def add(self, key: bytes, rows: RowSet, resets: int) -> None:
        """Add rows of a chunk, in memory of their own, and drop others beyond the budget."""
        with self._lock:
            if resets != self.resets or rows.rows.nbytes > self.budget:
                return
            chunk = self._chunks.setdefault(key, _Chunk())
            self.used -= chunk.nbytes
            kept = [row_set for row_set in chunk.sets if not rows.includes(row_set)]
            chunk.sets = [*kept, rows][-_MOST_SETS:]
            self.used += chunk.nbytes
            self._chunks.move_to_end(key)
            while self.used > self.budget:
                _, oldest = self._chunks.popitem(last=False)
                self.used -= oldest.nbytes

    def see(self, resets: int) -> None:
        """Drop all rows if the prefix cache was reset since; `resets` is what a worker reports."""
        with self._lock:
            if resets > self.resets:
                self.resets = resets
                self._chunks.clear()
                self.used = 0
