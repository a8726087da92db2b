"""Work on threads that do not keep a process alive if they hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def begin(call: Callable[[], R]) -> Future[R]:
    """Begin a call, which may never return, in a thread of its own; return its result."""
    result: Future[R] = Future()
    run = partial(_settle, result, call)
    threading.Thread(target=run, name="midstream call", daemon=True).start()
    return result


def _settle(result: Future[R], call: Callable[[], R]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        result.set_exception(error)


class OrderedCalls:
    """Calls that are made in one thread, in the order in which they were put."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()  # of `_settle`; None: the end
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, call: Callable[[], R]) -> Future[R]:
        """Return the result of a call that is made after all earlier ones."""
        result: Future[R] = Future()
        with self._lock:
            if self._thread is None:
                run = partial(_make_calls, self._calls)
                self._thread = threading.Thread(target=run, name="midstream calls", daemon=True)
                self._thread.start()
            self._calls.put((result, call))
        return result

    def close(self) -> None:
        """End the thread after the calls that were put; a later one starts another."""
        with self._lock:
            if self._thread is not None:
                self._calls.put(None)
            self._thread, self._calls = None, SimpleQueue()


def _make_calls(calls: SimpleQueue[Any]) -> None:
    while (entry := calls.get()) is not None:
        _settle(*entry)


def in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return `work(item)` for each item, in order; unlike an executor's, threads are daemons."""
    results: list[Future[R]] = [Future() for _ in items]
    numbers = count()

    def run() -> None:
        while (number := next(numbers)) < len(items):
            _settle(results[number], partial(work, items[number]))

    for _ in range(min(threads, len(items))):
        threading.Thread(target=run, name="midstream files", daemon=True).start()
    return [future.result() for future in results]


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
