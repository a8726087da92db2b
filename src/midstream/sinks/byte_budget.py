"""How much may be on its way to a sink."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future


class ByteBudget:
    """Room for so many bytes, given first come first served. What is larger than all of it gets it
    all. For any thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def take(self, size: int) -> Future[None]:
        """Is done once there is room; until then whoever waits may cancel it."""
        room: Future[None] = Future()
        with self._lock:
            self._waiting.append((size, room))
            self._admit()
        return room

    def give(self, size: int) -> None:
        """Gives room back."""
        with self._lock:
            self._used -= size
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            size, room = self._waiting[0]
            if self._used and self._used + size > self._most and not room.cancelled():
                return
            self._waiting.popleft()
            if room.set_running_or_notify_cancel():
                self._used += size
                room.set_result(None)
