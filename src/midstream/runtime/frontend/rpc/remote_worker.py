"""A worker as the front end sees it: its description, and its arena if it can be mapped."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from midstream.runtime.protocol.results import Lease, Leased, ResultHeader
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.transport.reader import MappedArena

# A lease keeps whole segments. If leases keep more than this part of an arena, rows are copied, so
# that there is memory for other requests.
MOST_HELD = 0.5


class RemoteWorker:
    """One worker."""

    def __init__(self, info: WorkerInfo, front_end: int = 0, front_ends: int = 1) -> None:
        self.info = info
        self.front_end = front_end  # number of this one among those of the engine
        self.arena_bytes = info.arena_bytes // front_ends
        self._arena: MappedArena | None = None
        with suppress(OSError):  # on another machine, or of another user: the worker sends rows
            self._arena = MappedArena(info.arena)

    @property
    def is_mapped(self) -> bool:
        return self._arena is not None

    @property
    def held(self) -> int:
        """Bytes of the arena that readers in this process lease."""
        return 0 if self._arena is None else self._arena.held

    def see(self, headers: Iterable[ResultHeader], retired: Iterable[int]) -> None:
        """Map the segments that results lie in, and release retired ones, which no longer exist."""
        if self._arena is not None:
            segments = {
                segment.number: (segment.fd, segment.nbytes)
                for header in headers
                if header.lease is not None
                for segment in header.lease.segments
            }
            self._arena.update(segments, retired)

    def leased(self, lease: Lease | None) -> Leased | None:
        """Return the memory of a lease; None: there is none, and the worker sent the rows."""
        if lease is None or self._arena is None:
            return None
        wanted = [segment.number for segment in lease.segments]
        held = self._arena.held + self._arena.adds(wanted)
        keep = held <= MOST_HELD * self.arena_bytes
        return Leased(self._arena.lease(lease.number, wanted), keep)

    def end_leases(self, numbers: Iterable[int]) -> None:
        """End leases whose memory nobody got."""
        if self._arena is not None:
            self._arena.end(numbers)
