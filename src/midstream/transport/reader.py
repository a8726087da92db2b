"""A worker's arena, as the process that reads it sees it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, from_numpy

from midstream.transport.leases import DONE, MOST, TOKEN_BYTES
from midstream.transport.memory import map_shared


@dataclass(frozen=True, slots=True)
class Address:
    """What a worker says of its arena.

    Attributes:
        pid: the worker's process.
        fd: of the memory of its leases.
        token: what that memory begins with, in hex: the process of this number may be another one,
            on another machine.
    """

    pid: int
    fd: int
    token: str


class MappedArena:
    """One worker's arena. Tensors made here are the worker's own memory; it is told when the last
    of a lease has gone. For any thread.
    """

    def __init__(self, address: Address) -> None:
        """Raises:
        OSError: that memory cannot be reached from here.
        """
        flags = map_shared(address.pid, address.fd, TOKEN_BYTES + MOST)
        if bytes(flags[:TOKEN_BYTES].numpy()).hex() != address.token:
            raise OSError(f"process {address.pid} of this machine is not the worker")
        self._pid = address.pid
        self._flags = flags[TOKEN_BYTES:].numpy()
        self._segments: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()  # finalizers run anywhere, here too
        self._users: Counter[int] = Counter()  # leases of each segment

    @property
    def held(self) -> int:
        """Bytes of the segments in which there are leases that have not ended."""
        with self._lock:
            return sum(self._sizes[segment] for segment in self._users)

    def adds(self, segments: Iterable[int]) -> int:
        """By how much a lease of these segments adds to what is held."""
        with self._lock:
            return sum(self._sizes[one] for one in segments if one not in self._users)

    def update(self, segments: Mapping[int, tuple[int, int]], retired: Iterable[int]) -> None:
        """Maps segments that are not mapped yet, by (file descriptor, bytes), and forgets those
        that are gone: their memory is free when the last tensor in it is.

        Raises:
            OSError: a segment cannot be reached.
        """
        for number in retired:
            self._segments.pop(number, None)
        for number, (fd, nbytes) in segments.items():
            if number not in self._segments:
                self._segments[number] = map_shared(self._pid, fd, nbytes)
                self._sizes[number] = nbytes

    def lease(self, number: int, segments: Iterable[int]) -> dict[int, Tensor]:
        """Each segment's memory. Once none of these tensors, and nothing that shares their memory,
        is left, the lease ends.

        Args:
            number: the lease's.
            segments: those that it is for.
        """
        arrays = {segment: self._segments[segment].numpy()[:] for segment in segments}
        left = set(arrays)

        def gone(segment: int) -> None:
            with self._lock:
                left.discard(segment)
                self._users[segment] -= 1
                if not self._users[segment]:
                    del self._users[segment]
            if not left:
                self._flags[number] = DONE

        with self._lock:
            self._users.update(arrays.keys())
        tensors = {}
        for segment, array in arrays.items():
            finalizer = weakref.finalize(array, gone, segment)
            # When the process ends there is nobody to tell.
            finalizer.atexit = False
            tensors[segment] = from_numpy(array)
        return tensors
