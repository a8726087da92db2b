"""Ranges of a fixed space, shared by content and counted by use."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from midstream.runtime.ranges import RangeAllocator


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
