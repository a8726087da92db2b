"""A worker's arena, as the process that reads it sees it."""

from __future__ import annotations

import threading
import weakref
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
        self._lock = threading.RLock()  # finalizers run anywhere, here too
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes of rows in leases that have not ended."""
        return self._held

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

    def lease(self, number: int, nbytes: int, segments: Iterable[int]) -> dict[int, Tensor]:
        """Each segment's memory. Once none of these tensors, and nothing that shares their memory,
        is left, the lease ends.

        Args:
            number: the lease's.
            nbytes: how much of its segments is its own.
            segments: those that it is for.
        """
        arrays = {segment: self._segments[segment].numpy()[:] for segment in segments}
        left = [len(arrays)]

        def gone() -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
                self._held -= nbytes
            self._flags[number] = DONE

        with self._lock:
            self._held += nbytes
        tensors = {}
        for segment, array in arrays.items():
            finalizer = weakref.finalize(array, gone)
            # When the process ends there is nobody to tell.
            finalizer.atexit = False
            tensors[segment] = from_numpy(array)
        return tensors

    def end(self, number: int) -> None:
        """Ends a lease of which nothing was read."""
        self._flags[number] = DONE
