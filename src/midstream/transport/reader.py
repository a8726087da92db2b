"""Reader's view of a worker's arena."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.transport.forks import FORKS, NO_FORK
from midstream.transport.leases import DONE, MOST, TOKEN_BYTES, Address
from midstream.transport.memory import map_shared


@dataclass(eq=False, slots=True)
class _OpenLease:
    number: int
    segments: list[int]
    taken: int  # see `Forks.claim`
    users: int  # arrays of it that exist


class MappedArena:
    """One worker's arena, mapped into this process. Thread-safe. A lease ends when its last array
    is freed here and no child forked meanwhile lives.
    """

    def __init__(self, address: Address) -> None:
        flags = map_shared(address.pid, address.fd, TOKEN_BYTES + MOST)
        if bytes(flags[:TOKEN_BYTES].numpy()).hex() != address.token:
            raise OSError(f"process {address.pid} on this machine is not the worker")
        self._pid = address.pid
        self._owner = os.getpid()
        self._flags = flags[TOKEN_BYTES:].numpy()
        self._segments: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()  # leases of each segment
        # An entry for each freed array. Finalizers may run anywhere, even under the lock: they only
        # append to this.
        self._freed: deque[_OpenLease] = deque()
        self._inherited: list[_OpenLease] = []  # freed here, and maybe not in a child

    @property
    def held(self) -> int:
        """Total size of the segments with active leases, in bytes."""
        if not (self._users or self._freed or self._inherited):
            return 0
        with self._exclusive():
            return sum(self._sizes[segment] for segment in self._users)

    def adds(self, segments: Iterable[int]) -> int:
        """Return by how much a lease of these segments would increase `held`, in bytes."""
        with self._exclusive():
            return sum(self._sizes[segment] for segment in segments if segment not in self._users)

    def update(self, segments: Mapping[int, tuple[int, int]], retired: Iterable[int]) -> None:
        """Map new segments, by (descriptor, bytes); drop retired ones, which tensors may keep."""
        for number in retired:
            self._segments.pop(number, None)
        for number, (fd, nbytes) in segments.items():
            if number not in self._segments:
                self._segments[number] = map_shared(self._pid, fd, nbytes)
                self._sizes[number] = nbytes

    def lease(self, number: int, segments: Iterable[int]) -> dict[int, NDArray[np.uint8]]:
        """Return each segment's memory, uint8; freeing these arrays and views ends the lease."""
        # Slices of such an array refer to it, and not to the tensor below it.
        arrays = {segment: self._segments[segment].numpy() for segment in segments}
        lease = _OpenLease(number, list(arrays), 0, len(arrays))
        with self._exclusive():
            lease.taken = FORKS.claim(lease)
            self._users.update(lease.segments)
        for array in arrays.values():
            finalizer = weakref.finalize(array, self._free, lease)
            # At process exit there is no need to notify the worker.
            finalizer.atexit = False
        return arrays

    def end(self, numbers: Iterable[int]) -> None:
        """End leases, given by number, that `lease` was not called for."""
        for number in numbers:
            self._flags[number] = DONE

    def _free(self, lease: _OpenLease) -> None:
        if os.getpid() == self._owner:
            self._freed.append(lease)
            self._settle()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._settle()
        with self._lock:
            yield
        self._settle()  # for finalizers that ran meanwhile

    def _settle(self) -> None:
        """End the leases that are freed, here and in children."""
        # If another call has the lock, that one does it before it returns.
        while (self._freed or self._inherited) and self._lock.acquire(blocking=False):
            try:
                while self._freed:
                    lease = self._freed.popleft()
                    lease.users -= 1
                    if not lease.users:
                        FORKS.drop(lease)
                        self._inherited.append(lease)
                newest = FORKS.newest() if self._inherited else NO_FORK
                for lease in self._inherited:
                    if lease.taken > newest:
                        self._end(lease)
                self._inherited = [lease for lease in self._inherited if lease.taken <= newest]
            finally:
                self._lock.release()
            if not self._freed:
                return

    def _end(self, lease: _OpenLease) -> None:
        for segment in lease.segments:
            self._users[segment] -= 1
            if not self._users[segment]:
                del self._users[segment]
        self._flags[lease.number] = DONE
