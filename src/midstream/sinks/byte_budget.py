"""Byte budget of a sink's pending deliveries."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future


class ByteBudget:
    """Bytes, granted in the order of requests; one above all is granted alone. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits for its grant."""
        return bool(self._waiting)

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._used

    def take(self, size: int) -> Future[None]:
        """Request bytes; the future completes with the grant and may be cancelled before."""
        grant: Future[None] = Future()
        with self._lock:
            self._waiting.append((size, grant))
            self._admit()
        return grant

    def give(self, size: int) -> None:
        """Release bytes."""
        with self._lock:
            self._used -= size
            self._admit()

    def withdraw(self, grant: Future[None], size: int) -> None:
        """Cancel or release a grant whose caller was interrupted."""
        if not grant.cancel():
            self.give(size)

    def _admit(self) -> None:
        while self._waiting:
            size, grant = self._waiting[0]
            if self._used and self._used + size > self._most and not grant.cancelled():
                return
            self._waiting.popleft()
            if grant.set_running_or_notify_cancel():
                self._used += size
                grant.set_result(None)
