"""Readers' leases on arena memory, each ended by a flag byte, so that nobody waits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from torch import frombuffer, uint8

from midstream.transport.memory import SharedMemory

MOST = 1 << 20
TOKEN_BYTES = 16
DONE = 1


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a worker's arena."""

    pid: int
    fd: int  # of its leases' memory, in that process
    token: str  # first bytes of that memory, in hex: the process id may be another machine's


class Leases:
    """The leases of one worker, with the segments of each."""

    def __init__(self) -> None:
        # The first bytes identify the memory to a reader: see `midstream.transport.reader`.
        self._memory = SharedMemory.create(TOKEN_BYTES + MOST)
        token = bytearray(os.urandom(TOKEN_BYTES))
        self._memory.tensor[:TOKEN_BYTES] = frombuffer(token, dtype=uint8)
        self._flags = self._memory.tensor[TOKEN_BYTES:].numpy()
        self._given: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        return len(self._given)

    @property
    def address(self) -> Address:
        """The address by which a reader maps the flags."""
        token = bytes(self._memory.tensor[:TOKEN_BYTES].numpy()).hex()
        return Address(os.getpid(), self._memory.fd, token)

    def close(self) -> None:
        """Close the flags' file descriptor; existing mappings stay valid."""
        self._memory.close()

    def give(self, segments: list[int]) -> int | None:
        """Create a lease for segments and return its number; None if all numbers are in use."""
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
        """Return the segments of each lease that has ended since the last call."""
        # Of a copy: NumPy raises if the readers, which are other processes, set flags meanwhile.
        done = np.array(self._flags[: self._used]).nonzero()[0].tolist()
        for number in done:
            self._flags[number] = 0
            self._free.append(number)
        return [self._given.pop(number) for number in done]
