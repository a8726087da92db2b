"""Changes of the vectors that workers store, from the front end to the workers."""

from __future__ import annotations

from midstream.runtime.protocol.codec import Natural, ProtocolMessage


class VectorUpdate(ProtocolMessage, frozen=True, array_like=True):
    """Vectors to drop, which no running request of this front end names, then vectors to store."""

    dropped: tuple[str, ...]  # digests
    added: tuple[bytes, ...]  # numbers, as `Vector.data`
    front_end: Natural = 0
    freed: tuple[str, ...] = ()  # requests whose rows on the device nobody uses any more
