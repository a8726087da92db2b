"""The workers of an engine, as its front end sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from midstream.runtime.protocol.results import Leased
from midstream.transport.reader import Address, MappedArena

# A lease holds on to whole segments. Where much is held already the rows are copied, so that others
# have room.
MOST_HELD = 0.5


class RemoteWorker:
    """One worker.

    Attributes:
        description: what it said of itself.
        place: its pipeline stage, and its rank in the tensor-parallel group, within its replica.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.place = [description["stage"], description["tensor_rank"]]
        self._arena: MappedArena | None = None
        try:
            self._arena = MappedArena(Address(**description["arena"]))
        except OSError:
            # It is on another machine, or another user's: rows are sent.
            self._arena = None

    @property
    def is_mapped(self) -> bool:
        """Whether its memory can be reached from here."""
        return self._arena is not None

    @property
    def held(self) -> int:
        """Bytes of its memory that readers here hold."""
        return 0 if self._arena is None else self._arena.held

    def see(self, headers: Iterable[Mapping[str, Any]], retired: Iterable[int]) -> None:
        """Maps what an answer speaks of, and lets go of segments that are gone."""
        if self._arena is not None:
            leases = [header["lease"] for header in headers if header["lease"] is not None]
            segments = {
                int(number): (fd, nbytes)
                for lease in leases
                for number, (fd, nbytes) in lease["segments"].items()
            }
            self._arena.update(segments, retired)

    def leased(self, lease: Mapping[str, Any] | None) -> Leased | None:
        """What was left to this reader; None: the rows were sent."""
        if lease is None or self._arena is None:
            return None
        wanted = [int(segment) for segment in lease["segments"]]
        held = self._arena.held + self._arena.adds(wanted)
        keep = held <= MOST_HELD * self.description["arena_bytes"]
        return Leased(self._arena.lease(lease["number"], wanted), keep)
