"""Vectors that plans name by digest, in a worker's memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from midstream.plan import Vector
from midstream.runtime.protocol.vector_update import VectorUpdate


class VectorStore:
    """Vectors by digest, each dropped once every front end that added it has dropped it."""

    def __init__(self) -> None:
        self._vectors: dict[str, Vector] = {}
        self._front_ends: dict[str, set[int]] = {}  # that added it, by digest
        self.by_digest: Mapping[str, Vector] = MappingProxyType(self._vectors)

    def update(self, update: VectorUpdate) -> None:
        """Drop vectors of a front end, then store new ones."""
        for digest in update.dropped:
            front_ends = self._front_ends.get(digest, set())
            front_ends.discard(update.front_end)
            if not front_ends:
                self._vectors.pop(digest, None)
                self._front_ends.pop(digest, None)
        for data in update.added:
            vector = Vector(data)
            self._vectors.setdefault(vector.digest, vector)
            self._front_ends.setdefault(vector.digest, set()).add(update.front_end)

    def count(self, front_end: int) -> int:
        """Return the number of vectors that are stored for a front end."""
        return sum(front_end in front_ends for front_ends in self._front_ends.values())
