"""Changes of the vectors that workers store, from the front end to the workers."""

from __future__ import annotations

from midstream.runtime.protocol.codec import Natural, ProtocolMessage


class VectorUpdate(ProtocolMessage, frozen=True, array_like=True):
    """Vectors to drop, then vectors to store.

    Attributes:
        dropped: digests of vectors that no running request of this front end names.
        added: the numbers of new vectors, as `Vector.data`.
        front_end: number of the front end.
    """

    dropped: tuple[str, ...]
    added: tuple[bytes, ...]
    front_end: Natural = 0
