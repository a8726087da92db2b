"""Vectors that plans name by digest, in a worker's memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.spec import Vector


class VectorStore:
    """The vectors that the front end had this worker store, see `runtime.frontend.request.
    sent_vectors`. The worker computes each digest itself.

    Attributes:
        by_digest: the vectors; a view.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, Vector] = {}
        self.by_digest: Mapping[str, Vector] = MappingProxyType(self._vectors)

    def update(self, update: VectorUpdate) -> None:
        """Drop vectors, then store new ones.

        Raises:
            SpecError: what is to be stored is no vector.
        """
        for digest in update.dropped:
            self._vectors.pop(digest, None)
        for data in update.added:
            vector = Vector(data)
            self._vectors.setdefault(vector.digest, vector)
