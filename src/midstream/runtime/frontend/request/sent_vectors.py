"""Vectors that an engine's workers store, sent once: those in use, and the last ones used."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from midstream.plan import ResolvedPlan, Vector
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.protocol.segments import vectors_of
from midstream.runtime.protocol.vector_update import VectorUpdate

# A plan whose vectors take no more bytes together has them by value: that costs no more than the
# digests, and the message of their own, which the workers would need first.
MOST_BY_VALUE = 4096
# Bytes of vectors that no running request names and the workers keep.
MOST_UNUSED = 64 << 20


def named_vectors(plan: ResolvedPlan) -> tuple[Vector, ...]:
    """Return the vectors of a plan, each once, if its bytes name them by digest; else nothing."""
    parts = [*(edit.steps for edit in plan.edits), *(probe.steps for probe in plan.probes)]
    steps = {part.digest: part for part in parts}
    vectors = dict.fromkeys(
        vector
        for part in steps.values()
        for step in part.instructions
        for run in vectors_of(step)
        for vector in run
        if not isinstance(vector, DeviceRow)
    )
    is_small = sum(len(vector.data) for vector in vectors) <= MOST_BY_VALUE
    return () if is_small else tuple(vectors)


class SentVectors:
    """The vectors that an engine's workers store, in the order of `take`. Pair with `release`."""

    def __init__(
        self,
        most_unused: int | None = None,
        matrices: int = 0,
        front_end: int = 0,
        front_ends: int = 1,
    ) -> None:
        """Create it for one of `front_ends`. Up to `most_unused` bytes that no running request
        names are kept, None: its part of `MOST_UNUSED`, and `matrices` bytes on top.
        """
        own = MOST_UNUSED // front_ends if most_unused is None else most_unused
        self._most_unused = own + matrices
        self._front_end = front_end
        self._taken: dict[str, tuple[str, ...]] = {}  # digests by uid
        self._users: Counter[str] = Counter()  # by digest
        # Stored vectors that no running request names, the one used last at the end.
        self._unused: OrderedDict[str, int] = OrderedDict()
        self._unused_bytes = 0
        self._sizes: dict[str, int] = {}  # bytes of each stored vector

    @property
    def in_use(self) -> int:
        return len(self._users)

    def check_integrity(self, stored: Iterable[int]) -> None:
        """Check invariants that hold when all that was sent has arrived and is stored."""
        counts = list(stored)
        assert all(count == len(self._sizes) for count in counts), (counts, len(self._sizes))
        assert self._unused.keys() == self._sizes.keys() - self._users.keys()
        assert self._unused_bytes == sum(self._unused.values())

    def take(self, uid: str, vectors: Sequence[Vector]) -> VectorUpdate | None:
        """Record that a plan's version leaves now; return what workers must do before it."""
        if not vectors:
            return None
        known = self._taken.get(uid, ())
        if known:
            vectors = [vector for vector in vectors if vector.digest not in known]
            if not vectors:
                return None
        self._taken[uid] = (*known, *[vector.digest for vector in vectors])
        added = []
        for vector in vectors:
            self._users[vector.digest] += 1
            if vector.digest not in self._sizes:
                self._sizes[vector.digest] = len(vector.data)
                added.append(vector.data)
            elif vector.digest in self._unused:
                self._unused_bytes -= self._unused.pop(vector.digest)
        dropped = self._drop()
        if not added and not dropped:
            return None
        return VectorUpdate(dropped, tuple(added), self._front_end)

    def release(self, uid: str) -> None:
        """Record that a request has ended. Later calls do nothing."""
        for digest in self._taken.pop(uid, ()):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                # It is not stored if it was lost.
                if digest in self._sizes:
                    self._unused[digest] = self._sizes[digest]
                    self._unused_bytes += self._sizes[digest]

    def lose(self, update: VectorUpdate) -> None:
        """Record that an update could not be sent: the next request brings its vectors again."""
        for digest in [Vector(data).digest for data in update.added]:
            self._sizes.pop(digest, None)
            self._unused_bytes -= self._unused.pop(digest, 0)

    def _drop(self) -> tuple[str, ...]:
        dropped = []
        while self._unused_bytes > self._most_unused:
            digest, size = self._unused.popitem(last=False)
            self._unused_bytes -= size
            del self._sizes[digest]
            dropped.append(digest)
        return tuple(dropped)
