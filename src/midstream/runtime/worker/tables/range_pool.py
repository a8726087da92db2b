"""Ranges of a fixed space, shared by content and counted by use."""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    start: int
    length: int
    users: int


class Pool:
    """Hands out one range per distinct key, for as long as somebody uses it."""

    def __init__(self, size: int) -> None:
        self._ranges = RangeAllocator(size)
        self._held: dict[Hashable, _Held] = {}

    def acquire(self, key: Hashable, length: int) -> tuple[int, bool] | None:
        """(start of the key's range, whether it is new and has to be filled); None: no such room.

        Pair with `release`.
        """
        held = self._held.get(key)
        if held is not None:
            held.users += 1
            return held.start, False
        start = self._ranges.acquire(length)
        if start is None:
            return None
        self._held[key] = _Held(start, length, 1)
        return start, True

    def release(self, key: Hashable) -> None:
        """Ends one use of a key. Its range is free once nobody uses it."""
        held = self._held[key]
        held.users -= 1
        if held.users == 0:
            del self._held[key]
            self._ranges.release(held.start, held.length)

    @property
    def size(self) -> int:
        """How much there is in all."""
        return self._ranges.size

    @property
    def used(self) -> int:
        """How much is in use."""
        return self._ranges.size - self._ranges.free


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
