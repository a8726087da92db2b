"""Contiguous ranges out of a fixed space."""

from __future__ import annotations

import bisect


class RangeAllocator:
    """Hands out ranges of [0, size), first fit; neighbours that come back are joined."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def acquire(self, length: int) -> int | None:
        """The start of a free range of `length`, now taken; None if there is none so long."""
        if length == 0:
            return 0
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                if stop - start == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + length, stop)
                return start
        return None

    def release(self, start: int, length: int) -> None:
        """Gives a range back."""
        if length == 0:
            return
        index = bisect.bisect(self._free, (start, 0))
        stop = start + length
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    @property
    def free(self) -> int:
        """How much is not taken, in all."""
        return sum(stop - start for start, stop in self._free)
