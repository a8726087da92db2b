"""What readers hold of the arena, and how they say that they are done: a byte each, which both map.

A reader only ever sets a byte, and the worker takes it back, so neither waits for the other.
"""

from __future__ import annotations

import os

from torch import frombuffer, uint8

from midstream.transport.memory import SharedMemory

MOST = 1 << 20
TOKEN_BYTES = 16
DONE = 1


class Leases:
    """A worker's: which segments each lease is for."""

    def __init__(self) -> None:
        # The first bytes are what a reader knows the memory by: see `midstream.transport.reader`.
        self._memory = SharedMemory.create(TOKEN_BYTES + MOST)
        self._memory.tensor[:TOKEN_BYTES] = frombuffer(
            bytearray(os.urandom(TOKEN_BYTES)), dtype=uint8
        )
        self._flags = self._memory.tensor[TOKEN_BYTES:].numpy()
        self._given: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        return len(self._given)

    @property
    def address(self) -> dict[str, int | str]:
        """What a reader finds them by: see `midstream.transport.reader.Address`."""
        token = bytes(self._memory.tensor[:TOKEN_BYTES].numpy()).hex()
        return {"pid": os.getpid(), "fd": self._memory.fd, "token": token}

    def close(self) -> None:
        """Nobody can map them any more."""
        self._memory.close()

    def give(self, segments: list[int]) -> int | None:
        """A new lease of some segments; None: there are as many as there can be."""
        if self._free:
            number = self._free.pop()
        elif self._used < MOST:
            number, self._used = self._used, self._used + 1
        else:
            return None
        self._flags[number] = 0
        self._given[number] = segments
        return number

    def ended(self) -> list[list[int]]:
        """The segments of each lease whose reader is done. Told once."""
        done = self._flags[: self._used].nonzero()[0].tolist()
        for number in done:
            self._flags[number] = 0
            self._free.append(number)
        return [self._given.pop(number) for number in done]
