"""Time limit of the calls that one thread makes into code which may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallWatch:
    """Says when a call takes longer than its limit; its thread, a daemon, stays in it."""

    def __init__(self, name: str, seconds: float, late: Callable[[str], object]) -> None:
        """Begin; `late` is called with the name of a late call, in the thread that watches."""
        self._seconds = seconds
        self._late = late
        self._call = ""  # name of the call under way
        self._since = 0.0  # monotonic time at which it began; a later one if it was told as late
        self._lock = threading.Lock()
        self._over = threading.Event()
        # A daemon, like the thread that it watches.
        self.thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self.thread.start()

    @contextmanager
    def limited(self, call: str) -> Iterator[None]:
        """Watch a call while the context is open; of one thread, one call at a time."""
        with self._lock:
            self._call, self._since = call, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._call = ""

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        wait = self._seconds
        while not self._over.wait(wait):
            with self._lock:
                # Without a call it looks again after the time that none may exceed.
                wait = self._seconds
                if self._call:
                    wait += self._since - time.monotonic()
                if wait <= 0:
                    self._late(self._call)
                    self._since, wait = float("inf"), self._seconds
            wait = min(wait, self._seconds)
