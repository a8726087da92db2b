"""Reader's view of a worker's arena."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor, from_numpy

from midstream.transport.leases import DONE, MOST, TOKEN_BYTES, Address
from midstream.transport.memory import map_shared


class MappedArena:
    """One worker's arena, mapped into this process. Thread-safe.

    Tensors share the worker's memory. The worker is notified when the last tensor of a lease is
    freed.
    """

    def __init__(self, address: Address) -> None:
        """Raises:
        OSError: the memory cannot be mapped from this process.
        """
        flags = map_shared(address.pid, address.fd, TOKEN_BYTES + MOST)
        if bytes(flags[:TOKEN_BYTES].numpy()).hex() != address.token:
            raise OSError(f"process {address.pid} on this machine is not the worker")
        self._pid = address.pid
        self._flags = flags[TOKEN_BYTES:].numpy()
        self._segments: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()  # a finalizer may run while this thread has the lock
        self._users: Counter[int] = Counter()  # leases of each segment

    @property
    def held(self) -> int:
        """Total size of the segments with active leases, in bytes."""
        with self._lock:
            return sum(self._sizes[segment] for segment in self._users)

    def adds(self, segments: Iterable[int]) -> int:
        """Return by how much a lease of these segments would increase `held`, in bytes."""
        with self._lock:
            return sum(self._sizes[one] for one in segments if one not in self._users)

    def update(self, segments: Mapping[int, tuple[int, int]], retired: Iterable[int]) -> None:
        """Map new segments, given by (file descriptor, bytes), and drop retired ones.

        The memory of a retired segment is freed with its last tensor.

        Raises:
            OSError: a segment cannot be mapped.
        """
        for number in retired:
            self._segments.pop(number, None)
        for number, (fd, nbytes) in segments.items():
            if number not in self._segments:
                self._segments[number] = map_shared(self._pid, fd, nbytes)
                self._sizes[number] = nbytes

    def lease(self, number: int, segments: Iterable[int]) -> dict[int, Tensor]:
        """Return the memory of each segment of a lease, uint8.

        The lease ends when these tensors, and all tensors that share their memory, are freed.

        Args:
            number: number of the lease.
            segments: numbers of its segments.
        """
        arrays = {segment: self._segments[segment].numpy()[:] for segment in segments}
        left = set(arrays)

        def release(segment: int) -> None:
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
            finalizer = weakref.finalize(array, release, segment)
            # At process exit there is no need to notify the worker.
            finalizer.atexit = False
            tensors[segment] = from_numpy(array)
        return tensors
