"""Work on threads that do not keep a process alive if they hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class ThreadCall(Generic[R]):
    """A call that is made in a thread of its own, which may never return."""

    def __init__(self, call: Callable[[], R]) -> None:
        self._call = call
        self._result: Future[R] = Future()
        threading.Thread(target=self._run, name="midstream call", daemon=True).start()

    @property
    def has_returned(self) -> bool:
        """Whether it has returned, or raised."""
        return self._result.done()

    def wait(self, seconds: float) -> bool:
        """Wait until it has returned or raised, for at most so long; return whether it has."""
        return bool(wait((self._result,), seconds).done)

    def result(self) -> R:
        """Return what it returned, or raise what it raised; call it after `wait`."""
        return self._result.result(0)

    def _run(self) -> None:
        try:
            self._result.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._result.set_exception(error)


class OrderedCalls:
    """Calls that are made in one thread, in the order in which they were put."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()  # (call, result); None: the end
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, call: Callable[[], object]) -> Future[object]:
        """Return the result of a call that is made after all earlier ones."""
        result: Future[object] = Future()
        with self._lock:
            if self._thread is None:
                run = partial(_make_calls, self._calls)
                self._thread = threading.Thread(target=run, name="midstream calls", daemon=True)
                self._thread.start()
            self._calls.put((call, result))
        return result

    def close(self) -> None:
        """End the thread after the calls that were put; a later one starts another."""
        with self._lock:
            if self._thread is not None:
                self._calls.put(None)
            self._thread, self._calls = None, SimpleQueue()


def _make_calls(calls: SimpleQueue[Any]) -> None:
    while (entry := calls.get()) is not None:
        call, result = entry
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            result.set_exception(error)


def in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return `work(item)` for each item, in order; unlike an executor's, threads are daemons."""
    results: list[Future[R]] = [Future() for _ in items]
    numbers = count()

    def run() -> None:
        while (number := next(numbers)) < len(items):
            try:
                results[number].set_result(work(items[number]))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                results[number].set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=run, name="midstream files", daemon=True).start()
    return [future.result() for future in results]
