"""Ranges of a fixed space, shared by key, with a use count."""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Shared:
    start: int
    length: int
    users: int


class Pool:
    """One range for each key that is in use."""

    def __init__(self, size: int) -> None:
        self._ranges = RangeAllocator(size)
        self._shared: dict[Hashable, _Shared] = {}

    def acquire(self, key: Hashable, length: int) -> tuple[int, bool] | None:
        """Return (start, whether new) of a key's range; None: no room. Pair with `release`."""
        shared = self._shared.get(key)
        if shared is not None:
            shared.users += 1
            return shared.start, False
        start = self._ranges.acquire(length)
        if start is None:
            return None
        self._shared[key] = _Shared(start, length, 1)
        return start, True

    def release(self, key: Hashable) -> None:
        shared = self._shared[key]
        shared.users -= 1
        if shared.users == 0:
            del self._shared[key]
            self._ranges.release(shared.start, shared.length)

    @property
    def size(self) -> int:
        return self._ranges.size

    @property
    def used(self) -> int:
        """Sum of the lengths in use."""
        return self._ranges.size - self._ranges.free


class RangeAllocator:
    """Ranges of [0, size), first fit; adjacent free ranges are merged."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def acquire(self, length: int) -> int | None:
        """Return the start of a range of `length`; None: no free one. Pair with `release`."""
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
        return sum(stop - start for start, stop in self._free)
