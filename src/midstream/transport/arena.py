"""Where captured rows lie between the device and whoever reads them: a log of shared segments.

What a step captures is written behind what the step before it captured. A segment is used again
when nobody needs anything in it: not the ledger, and no reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from midstream.transport.leases import Leases
from midstream.transport.memory import SharedMemory

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """How much there is, and what happens beyond.

    Attributes:
        budget: bytes of memory that segments may take together.
        segment: bytes of one, at least.
        overflow: "block": the front door lets in no more than fits, so what is here is never
            refused; "spill": segments beyond the budget are files; "drop": there are none.
        spill_folder: where such files lie; they have no name.
    """

    budget: int
    segment: int
    overflow: str
    spill_folder: Path


@dataclass(slots=True)
class _Segment:
    number: int
    memory: SharedMemory
    on_disk: bool
    users: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """Some bytes of a segment.

    Attributes:
        segment: its number; no two segments of an arena ever have the same.
        offset: where in it they begin.
        memory: uint8, these bytes.
        pinned: whether a device can write there while the host goes on.
    """

    segment: int
    offset: int
    memory: Tensor
    pinned: bool


class Arena:
    """Owner of the segments."""

    def __init__(self, settings: ArenaSettings, pin: bool) -> None:
        """Args:
        settings: how much there is.
        pin: whether a CUDA device writes into it.
        """
        self._settings = settings
        self._pin = pin
        self._segments: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._current: _Segment | None = None
        self._filled = 0
        self._numbers = 0
        self._made = 0  # bytes of memory in segments that are not on disk
        self._spills = 0
        self._retired: list[int] = []
        self._leases = Leases()
        # Pinning takes time: one segment is made while another is being filled.
        self._maker = ThreadPoolExecutor(1, "midstream arena") if pin else None
        self._next: Future[SharedMemory] | None = None

    @property
    def budget(self) -> int:
        """Bytes of memory that segments may take together."""
        return self._settings.budget

    @property
    def leases(self) -> Leases:
        """What readers hold."""
        return self._leases

    def take(self, nbytes: int) -> Extent | None:
        """Room for some bytes, which has one user; None: it is full, and the rest is dropped.

        Raises:
            OSError: the folder for what is beyond the budget is full.
        """
        if self._current is not None and self._current.users == 1:
            self._filled = 0  # all that was in it has gone
        start = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
        if self._current is None or start + nbytes > self._current.memory.nbytes:
            self._leave_current()
            found = self._find(nbytes)
            if found is None:
                return None
            self._current, start = found, 0
            found.users += 1
        segment = self._current
        self._filled = start + nbytes
        segment.users += 1
        self._look_ahead(segment)
        memory = segment.memory.tensor[start : start + nbytes]
        return Extent(segment.number, start, memory, self._pin and not segment.on_disk)

    def use(self, segments: Iterable[int]) -> None:
        """One more user of each."""
        for number in segments:
            self._segments[number].users += 1

    def let_go(self, segments: Iterable[int]) -> None:
        """One user less of each; who has none is free."""
        for number in segments:
            segment = self._segments[number]
            segment.users -= 1
            if segment.users == 0:
                if segment.on_disk:
                    self._retire(segment)
                else:
                    self._free.append(segment)

    def lease(self, segments: list[int]) -> int | None:
        """Leaves segments, each of which has a user for it, to a reader, until it says that it is
        done; the number of the lease. None: there are too many leases.
        """
        return self._leases.give(segments)

    def sweep(self) -> None:
        """Takes back what readers are done with."""
        for segments in self._leases.ended():
            self.let_go(segments)

    def describe(self, segments: Iterable[int]) -> dict[int, tuple[int, int]]:
        """What a reader maps segments by: per number (file descriptor, bytes)."""
        return {
            number: (self._segments[number].memory.fd, self._segments[number].memory.nbytes)
            for number in segments
        }

    def take_retired(self) -> list[int]:
        """The numbers of segments that are gone and that readers were not told of yet."""
        retired, self._retired = self._retired, []
        return retired

    def memory_of(self, segment: int) -> Tensor:
        """uint8, a whole segment."""
        return self._segments[segment].memory.tensor

    @property
    def used(self) -> dict[str, int]:
        """How much there is: bytes in memory, on disk and free, leases, segments; and how many
        segments ever went to disk.
        """
        return {
            "memory_bytes": self._made,
            "free_bytes": sum(segment.memory.nbytes for segment in self._free),
            "disk_bytes": sum(
                segment.memory.nbytes for segment in self._segments.values() if segment.on_disk
            ),
            "leases": len(self._leases),
            "segments": len(self._segments),
            "spills": self._spills,
        }

    def close(self) -> None:
        """Ends it. What readers hold is there until they let go."""
        for segment in list(self._segments.values()):
            self._retire(segment)
        self._leases.close()
        self._current, self._free = None, []

    def check_idle(self) -> None:
        """Nobody needs anything: holds between requests, when readers have let go."""
        self.sweep()
        self._leave_current()
        assert all(segment.users == 0 for segment in self._segments.values()), self.used
        assert not len(self._leases)

    def _leave_current(self) -> None:
        current, self._current, self._filled = self._current, None, 0
        if current is not None:
            self.let_go([current.number])

    def _find(self, nbytes: int) -> _Segment | None:
        """A segment that nobody uses, and that has room."""
        self.sweep()
        large = [segment for segment in self._free if segment.memory.nbytes >= nbytes]
        if large:
            found = min(large, key=lambda segment: segment.memory.nbytes)
            self._free.remove(found)
            return found
        size = _size(self._settings.segment, nbytes)
        while self._free and self._made + size > self._settings.budget:
            self._retire(self._free.pop())
        if self._made + size <= self._settings.budget or self._settings.overflow == "block":
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
        return _new(size, self._pin)

    def _look_ahead(self, segment: _Segment) -> None:
        """Begins to make the segment that will be needed next, if none is free."""
        size = segment.memory.nbytes
        if (
            self._maker is not None
            and self._next is None
            and not self._free
            and 2 * self._filled > size
            and self._made + size <= self._settings.budget
        ):
            self._next = self._maker.submit(_new, size, True)

    def _add(self, memory: SharedMemory, on_disk: bool) -> _Segment:
        segment = _Segment(self._numbers, memory, on_disk)
        self._numbers += 1
        self._segments[segment.number] = segment
        if not on_disk:
            self._made += memory.nbytes
        return segment

    def _retire(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._retired.append(segment.number)
        if not segment.on_disk:
            self._made -= segment.memory.nbytes
        segment.memory.close()


def _size(least: int, nbytes: int) -> int:
    """Bytes of a segment that holds this much. Few sizes, so that it can be used again."""
    size = least
    while size < nbytes:
        size *= 2
    return size


def _new(size: int, pin: bool) -> SharedMemory:
    memory = SharedMemory.create(size)
    if pin:
        memory.pin()
    return memory
