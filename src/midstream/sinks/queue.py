"""Delivery queue of one sink, with a thread that writes, flushes and reports results."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink
from midstream.sinks.byte_budget import ByteBudget
from midstream.validation import kind

_LOGGER = logging.getLogger(__name__)

# Maximum seconds until a caller that does other work meanwhile gets an answer.
PATIENCE = 2.0

T = TypeVar("T")
_FOREVER = float("inf")


@dataclass(slots=True)
class _Entry:
    """One pending delivery.

    Attributes:
        delivery: the delivery; None once it is written, to free its rows.
        size: bytes that it uses of the budget.
        patience: seconds after the write by which it must be flushed.
        done: future of the result.
        result: result of the write.
    """

    delivery: Delivery | None
    size: int
    patience: float
    done: Future[CaptureResult] = field(default_factory=Future)
    result: CaptureResult = field(default_factory=CaptureResult)


class SinkQueue:
    """Queue of one sink. Deliveries are written in order and flushed in groups.

    A group is flushed when the patience of its first delivery has passed, when the budget is full,
    or when the queue is drained.
    """

    def __init__(self, name: str, sink: Sink, most_bytes: int, patience: float = PATIENCE) -> None:
        """Args:
        name: name of the sink.
        sink: the sink, opened.
        most_bytes: limit for deliveries whose result is pending, in bytes.
        patience: maximum wait of a delivery for its flush, in seconds.
        """
        self.name = name
        self._sink = sink
        self._most = most_bytes
        self._patience = patience
        self._bound = ByteBudget(most_bytes)
        self._queue: deque[_Entry] = deque()
        self._written: list[_Entry] = []
        self._unflushed = 0  # bytes of the written deliveries
        self._due = 0.0  # monotonic time at which they must be flushed
        self._draining = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """Queue a delivery, blocking until the budget has capacity for it.

        It is flushed when the queue's patience has passed, capacity is needed, or the queue is
        drained. Returns the future of the result.
        """
        grant = self._acquire(size)
        try:
            grant.result()
        except BaseException:
            self._withdraw(grant, size)
            raise
        return self._append(_Entry(delivery, size, self._patience))

    async def put_soon(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """Queue a delivery as `put` does, for an event loop.

        A caller waits for the last delivery of a completion, which is therefore flushed after the
        sink's `group_seconds`.
        """
        grant = self._acquire(size)
        try:
            await asyncio.wrap_future(grant)
        except BaseException:
            self._withdraw(grant, size)
            raise
        patience = self._sink.group_seconds if delivery.is_last else self._patience
        return self._append(_Entry(delivery, size, patience))

    def put_empty(self, delivery: Delivery) -> None:
        """Queue a delivery without rows, which uses no capacity and whose result is discarded."""
        self._append(_Entry(delivery, 0, self._patience))

    @property
    def unwritten(self) -> int:
        """Bytes of deliveries whose result is pending."""
        return self._bound.used

    def drain(self) -> None:
        """Write and flush all queued deliveries without waiting for more. Does not block."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def close(self) -> None:
        """Write and flush all queued deliveries and close the sink. Blocks until done.

        Does nothing in a forked process, because the queue belongs to its parent.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._thread is None:
                self._start()
            self._changed.notify()
        thread = self._thread
        # The garbage collector may call this in any thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _acquire(self, size: int) -> Future[None]:
        grant = self._bound.take(size)
        if not grant.done():
            with self._changed:
                self._changed.notify()  # flushing the written deliveries frees capacity
        return grant

    def _withdraw(self, grant: Future[None], size: int) -> None:
        """Cancel or release a grant whose caller was interrupted."""
        if not grant.cancel():
            self._bound.give(size)

    def _append(self, entry: _Entry) -> Future[CaptureResult]:
        entry.done.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        with self._changed:
            if self._closing:
                self._bound.give(entry.size)
                entry.done.set_result(CaptureResult("error", "the sink is closed"))
                return entry.done
            names, delivery = self._sink.names, entry.delivery
            if names is not None and delivery is not None:
                # A name that a caller gave is taken until its rows are stored.
                name = self._sink.name_of(delivery.tag, delivery.name)
                names.keep_until(entry.done, name)
            self._queue.append(entry)
            if self._thread is None:
                self._start()
            self._changed.notify()
        return entry.done

    def _start(self) -> None:
        # A daemon thread does not keep the process alive; the queue's owner closes the queue.
        self._thread = threading.Thread(
            target=self._run, name=f"midstream sink {self.name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while True:
            entry = self._next()
            if entry is not None:
                self._write(entry)
            elif self._written:
                self._flush()
            else:
                break
        _, problem = _guarded(self._sink.close)
        if problem:
            _LOGGER.error("closing the sink %s failed: %s", self.name, problem)

    def _next(self) -> _Entry | None:
        """Return the next delivery to write, blocking until there is one.

        None: the written deliveries must be flushed or, if there are none, the thread must end.
        """
        with self._changed:
            while True:
                is_large = 2 * self._unflushed >= self._most
                if self._written and (is_large or time.monotonic() >= self._due):
                    return None
                if self._queue:
                    return self._queue.popleft()
                if self._written and (self._draining or self._bound.is_wanted):
                    return None
                if self._closing:
                    return None
                self._draining = False
                wait = self._due - time.monotonic() if self._written else _FOREVER
                self._changed.wait(None if wait == _FOREVER else wait)

    def _write(self, entry: _Entry) -> None:
        delivery, entry.delivery = entry.delivery, None
        assert delivery is not None
        result, problem = _guarded(lambda: self._sink.write(delivery))
        if result is not None and not isinstance(result, CaptureResult):
            problem = f"write returned {kind(result)}; expected a CaptureResult or None"
        if problem:
            self._report(entry, CaptureResult("error", problem))
            return
        if result is not None:
            entry.result = result
        due = time.monotonic() + entry.patience
        self._due = min(self._due, due) if self._written else due
        self._written.append(entry)
        self._unflushed += entry.size

    def _flush(self) -> None:
        results, problem = _guarded(self._flushed)
        written, self._written = self._written, []
        self._unflushed = 0
        if results is not None and len(results) != len(written):
            problem = f"flush returned {len(results)} results for {len(written)} writes"
        for nth, entry in enumerate(written):
            if problem:
                entry.result = CaptureResult("error", problem)
            elif results is not None:
                entry.result = results[nth]
            self._report(entry, entry.result)

    def _flushed(self) -> list[CaptureResult] | None:
        """Flush the sink, and return what it returned.

        Raises:
            TypeError: that is something else than results.
        """
        given: Any = self._sink.flush()
        if given is None:
            return None
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"flush returned {kind(given)}; expected CaptureResults or None")
        found = list(given)
        for one in found:
            if not isinstance(one, CaptureResult):
                raise TypeError(f"flush returned a list with {kind(one)}; expected CaptureResults")
        return found

    def _report(self, entry: _Entry, result: CaptureResult) -> None:
        self._bound.give(entry.size)
        entry.done.set_result(result)


def _guarded(call: Callable[[], T]) -> tuple[T | None, str]:
    """Call a method of the sink; return its result and the message of its exception.

    An exception must not end the thread, on which all deliveries depend.
    """
    try:
        return call(), ""
    except BaseException as error:
        _LOGGER.debug("a sink raised", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
