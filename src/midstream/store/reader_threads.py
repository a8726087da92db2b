"""Threads that read batches ahead; they do not keep a process alive if a file system hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")


class ReaderThreads:
    """Calls in a fixed number of threads, begun in the order in which they were submitted."""

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()  # (result, call); None ends a thread
        self._threads = threads
        for _ in range(threads):
            run = partial(_make_calls, self._calls)
            threading.Thread(target=run, name="midstream reader", daemon=True).start()

    def submit(self, call: Callable[[], R]) -> Future[R]:
        result: Future[R] = Future()
        self._calls.put((result, call))
        return result

    def close(self) -> None:
        """Cancel the calls that have not begun, and end the threads; do not wait for them."""
        while True:
            try:
                result, _ = self._calls.get_nowait()
            except Empty:
                break
            result.cancel()
        for _ in range(self._threads):
            self._calls.put(None)


def _make_calls(calls: SimpleQueue[Any]) -> None:
    while (entry := calls.get()) is not None:
        result, call = entry
        if not result.set_running_or_notify_cancel():
            continue
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            result.set_exception(error)
        # While the thread waits, nothing keeps the batch.
        del entry, result, call
