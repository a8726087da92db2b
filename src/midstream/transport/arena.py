"""Arena for captured rows: a log of shared segments, reused when nothing needs their rows."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from midstream.transport.leases import Leases
from midstream.transport.memory import SharedMemory

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """Size of an arena in bytes, and what happens when it is full."""

    budget: int  # total memory of the segments
    segment: int  # minimum size
    overflow: str  # "block": the front end admits only what fits; "spill" to files; "drop" rows
    spill_folder: Path  # of files without a name


@dataclass(slots=True)
class _Segment:
    number: int
    memory: SharedMemory
    on_disk: bool
    users: int = 0


class Extent(NamedTuple):
    """A range of bytes of a segment."""

    segment: int  # number, unique for the lifetime of the arena
    offset: int
    memory: Tensor  # uint8, the bytes of the range
    pinned: bool  # whether a device can write to it asynchronously


class Arena:
    """Allocator and owner of the segments."""

    def __init__(self, settings: ArenaSettings, pin: bool) -> None:
        self._settings = settings
        self.budget = settings.budget
        self._pin = pin
        self._segments: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._current: _Segment | None = None
        self._filled = 0
        self._numbers = 0
        self._memory_bytes = 0  # total size of segments in memory
        self._spills = 0
        self._described: dict[int, set[int]] = {}  # segments that each reader was told of
        self.leases = Leases()
        # Pinning is slow: the next segment is created while the current one is filled.
        self._maker = ThreadPoolExecutor(1, "midstream arena") if pin else None
        self._next: Future[SharedMemory] | None = None

    def take(self, nbytes: int) -> Extent | None:
        """Allocate `nbytes` with one user; None if the arena is full and drops rows."""
        if self._current is not None and self._current.users == 1:
            self._filled = 0  # only the arena itself uses the segment
        start = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
        if self._current is None or start + nbytes > self._current.memory.nbytes:
            self.sweep()
            if self._current is not None and self._current.users == 1:
                self._leave_current()
            unused = self._find(nbytes)
            if unused is None:
                return None  # fewer bytes may fit behind those of the current segment
            self._leave_current()
            self._current, start = unused, 0
            unused.users += 1
        segment = self._current
        self._filled = start + nbytes
        segment.users += 1
        size = segment.memory.nbytes
        if (
            self._maker is not None
            and self._next is None
            and not self._free
            and 2 * self._filled > size
            and self._memory_bytes + size <= self.budget
        ):
            self._next = self._maker.submit(SharedMemory.create, size, True)
        memory = segment.memory.tensor[start : start + nbytes]
        return Extent(segment.number, start, memory, self._pin and not segment.on_disk)

    def use(self, segments: Iterable[int]) -> None:
        for number in segments:
            self._segments[number].users += 1

    def release(self, segments: Iterable[int]) -> None:
        """Remove a user from each segment; a segment without users is free."""
        for number in segments:
            segment = self._segments[number]
            segment.users -= 1
            if segment.users == 0 and segment.on_disk:
                self._retire(segment)
            elif segment.users == 0:
                self._free.append(segment)

    def lease(self, segments: list[int]) -> int | None:
        """Lease segments, which have a user for it; return the lease's number, None: too many."""
        return self.leases.give(segments)

    def sweep(self) -> None:
        for segments in self.leases.ended():
            self.release(segments)

    def describe(self, segments: Iterable[int], reader: int = 0) -> dict[int, tuple[int, int]]:
        """Return (file descriptor, bytes) by segment number, with which a reader maps segments."""
        memories = {number: self._segments[number].memory for number in segments}
        self._described.setdefault(reader, set()).update(memories)
        return {number: (memory.fd, memory.nbytes) for number, memory in memories.items()}

    def take_retired(self, reader: int = 0) -> list[int]:
        """Return the numbers of retired segments that a reader was told of, once."""
        described = self._described.get(reader, set())
        retired = sorted(described - self._segments.keys())
        described.difference_update(retired)
        return retired

    def memory_of(self, segment: int) -> Tensor:
        return self._segments[segment].memory.tensor

    @property
    def used(self) -> dict[str, int]:
        """Usage: bytes, leases, segments, and how many were ever created on disk (`spills`)."""
        return {
            "memory_bytes": self._memory_bytes,
            "free_bytes": sum(segment.memory.nbytes for segment in self._free),
            "disk_bytes": sum(seg.memory.nbytes for seg in self._segments.values() if seg.on_disk),
            "leases": len(self.leases),
            "segments": len(self._segments),
            "spills": self._spills,
        }

    def close(self) -> None:
        """Retire all segments. Memory that readers have mapped stays valid for them."""
        for segment in list(self._segments.values()):
            self._retire(segment)
        self.leases.close()
        self._current, self._free = None, []

    def _leave_current(self) -> None:
        current, self._current, self._filled = self._current, None, 0
        if current is not None:
            self.release([current.number])

    def _find(self, nbytes: int) -> _Segment | None:
        """Return an unused segment of at least `nbytes`; None if rows are dropped."""
        large = [segment for segment in self._free if segment.memory.nbytes >= nbytes]
        if large:
            smallest = min(large, key=lambda segment: segment.memory.nbytes)
            self._free.remove(smallest)
            return smallest
        size = self._settings.segment  # times a power of two, to ease reuse
        while size < nbytes:
            size *= 2
        while self._free and self._memory_bytes + size > self.budget:
            self._retire(self._free.pop())
        if self._memory_bytes + size <= self.budget or self._settings.overflow == "block":
            return self._add(self._make(size), on_disk=False)
        if self._settings.overflow == "spill":
            memory = SharedMemory.on_disk(size, self._settings.spill_folder)
            self._spills += 1
            return self._add(memory, on_disk=True)
        return None

    def _make(self, size: int) -> SharedMemory:
        ahead, self._next = self._next, None
        if ahead is not None:
            memory = ahead.result()
            if memory.nbytes >= size:
                return memory
            memory.close()
        return SharedMemory.create(size, self._pin)

    def _add(self, memory: SharedMemory, on_disk: bool) -> _Segment:
        segment = _Segment(self._numbers, memory, on_disk)
        self._numbers += 1
        self._segments[segment.number] = segment
        if not on_disk:
            self._memory_bytes += memory.nbytes
        return segment

    def _retire(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        if not segment.on_disk:
            self._memory_bytes -= segment.memory.nbytes
        segment.memory.close()
