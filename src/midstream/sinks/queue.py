"""Delivery queue of one sink, whose thread writes, flushes and reports. A call may never return:
after a time limit all that it was given, and that comes before it returns, fails.
"""

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
from functools import partial
from typing import Any, TypeVar

from midstream.config.sinks import CALL_SECONDS, CLOSE_SECONDS
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink
from midstream.sinks.daemon_threads import CallWatch
from midstream.validation import kind

_LOGGER = logging.getLogger(__name__)

# Maximum seconds until a caller that does other work meanwhile gets an answer.
PATIENCE = 2.0

T = TypeVar("T")
_LOOK_SECONDS = 0.1  # interval of looks at a sink that is being closed


@dataclass(slots=True)
class _Entry:
    delivery: Delivery | None  # None once it is written, to free its rows
    size: int  # bytes that it uses of the budget
    patience: float  # seconds after the write by which it must be flushed
    done: Future[CaptureResult] = field(default_factory=Future)
    result: CaptureResult = field(default_factory=CaptureResult)
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Times of one sink's queue, in seconds."""

    patience: float = PATIENCE  # maximum wait of a delivery for its flush
    call: float = CALL_SECONDS  # maximum time of one call of the sink
    close: float = CLOSE_SECONDS  # maximum time for what is queued when the queue is closed


class ByteBudget:
    """Bytes, granted in the order of requests; one above all is granted alone. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.used = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def take(self, size: int) -> Future[None]:
        """Request bytes; the future completes with the grant and may be cancelled before."""
        grant: Future[None] = Future()
        with self._lock:
            self._waiting.append((size, grant))
            self._admit()
        return grant

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size
            self._admit()

    def withdraw(self, grant: Future[None], size: int) -> None:
        """Cancel or release a grant whose caller was interrupted."""
        if not grant.cancel():
            self.give(size)

    def _admit(self) -> None:
        while self._waiting:
            size, grant = self._waiting[0]
            if self.used and self.used + size > self._most and not grant.cancelled():
                return
            self._waiting.popleft()
            if grant.set_running_or_notify_cancel():
                self.used += size
                grant.set_result(None)


class SinkQueue:
    """Queue of one sink; written in order, flushed in groups by patience, budget or drain."""

    def __init__(
        self, name: str, sink: Sink, most_bytes: int, times: QueueTimes | None = None
    ) -> None:
        self.name = name
        self._sink = sink
        self._most = most_bytes
        self._times = times or QueueTimes()
        self._bound = ByteBudget(most_bytes)
        self._queue: deque[_Entry] = deque()
        self._written: list[_Entry] = []
        self._unflushed = 0  # bytes of the written deliveries
        self._due = 0.0  # monotonic time at which they must be flushed
        self._draining = False
        self._closing = False
        self._current: _Entry | None = None  # is being written
        self.stalled = ""  # why the sink takes nothing: a call of it that has not returned
        self._watch: CallWatch | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """Queue a delivery, blocking until the budget has capacity; return its result's future."""
        grant = self._acquire(size)
        try:
            grant.result()
        except BaseException:
            self._bound.withdraw(grant, size)
            raise
        return self._append(_Entry(delivery, size, self._times.patience))

    async def put_soon(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """Queue a delivery as `put` does; the last one of a completion after `group_seconds`."""
        grant = self._acquire(size)
        try:
            await asyncio.wrap_future(grant)
        except BaseException:
            self._bound.withdraw(grant, size)
            raise
        patience = self._sink.group_seconds if delivery.is_last else self._times.patience
        return self._append(_Entry(delivery, size, patience))

    def put_empty(self, delivery: Delivery) -> None:
        """Queue a delivery without rows, which uses no capacity and whose result is discarded."""
        self._append(_Entry(delivery, 0, self._times.patience))

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
        """Write and flush all queued deliveries and close the sink, within the queue's time for it:
        what is left then fails, and the log says how much. Nothing in a fork, whose parent has the
        queue.
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
        assert thread is not None
        # The garbage collector may call this in any thread.
        if threading.current_thread() in (thread, self._watch and self._watch.thread):
            return
        until = time.monotonic() + self._times.close
        # The thread does not end while a call of the sink does not return.
        while thread.is_alive() and not self.stalled and time.monotonic() < until:
            thread.join(min(_LOOK_SECONDS, self._times.close))
        if thread.is_alive():
            limit = f"{self._times.close:g} s (the sink's `close_seconds`)"
            self._fail_all(self.stalled or f"it was closed, and not stored within {limit}")

    def _acquire(self, size: int) -> Future[None]:
        grant = self._bound.take(size)
        if not grant.done():
            with self._changed:
                self._changed.notify()  # flushing the written deliveries frees capacity
        return grant

    def _append(self, entry: _Entry) -> Future[CaptureResult]:
        entry.done.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        with self._changed:
            why = self.stalled or ("the sink is closed" if self._closing else "")
            if why:
                self._bound.give(entry.size)
                entry.done.set_result(CaptureResult("error", why))
                return entry.done
            names = self._sink.names
            if names is not None and entry.delivery is not None:
                # The name that a caller gave is kept until the rows are stored.
                name = self._sink.name_of(entry.delivery.tag, entry.delivery.name)
                names.keep_until(entry.done, name)
            self._queue.append(entry)
            if self._thread is None:
                self._start()
            self._changed.notify()
        return entry.done

    def _start(self) -> None:
        # A daemon thread does not keep the process alive; the queue's owner closes the queue.
        name = f"midstream sink {self.name}"
        self._watch = CallWatch(f"{name}: time limit", self._times.call, self._stall)
        self._thread = threading.Thread(
            target=self._run, args=(self._watch,), name=name, daemon=True
        )
        self._thread.start()

    def _stall(self, call: str) -> None:
        limit = f"{self._times.call:g} s (the sink's `call_seconds`)"
        self._fail_all(f"{call} has not returned for {limit}", call)

    def _fail_all(self, why: str, call: str = "") -> None:
        """End all deliveries with an error: a `call` does not return, or the queue is closed."""
        with self._changed:
            self.stalled = why
            queued, current = tuple(self._queue), self._current
            self._queue.clear()
            # The sink will return results of the written ones as well, so these stay in their list.
            every = [*self._written, *([current] if current else ()), *queued]
            lost = [entry for entry in every if not entry.is_reported]
        if lost or call:
            more = "; until it returns no others are stored" if call else ""
            size = sum(entry.size for entry in lost)
            amount = f"{len(lost)} deliveries of {size} bytes are not stored, or in part"
            _LOGGER.error("the sink %s: %s; %s%s", self.name, why, amount, more)
        for entry in lost:
            self._report(entry, CaptureResult("error", why))

    def _call(self, name: str, call: Callable[[], T]) -> tuple[T | None, str]:
        """Call a method of the sink within its time limit; see `_guarded`."""
        assert self._watch is not None
        with self._watch.limited(name):
            outcome = _guarded(call)
        if self.stalled:
            with self._changed:
                self.stalled = ""
            _LOGGER.warning("the sink %s: %s has returned", self.name, name)
        return outcome

    def _run(self, watch: CallWatch) -> None:
        while True:
            entry = self._next()
            if entry is not None:
                self._write(entry)
            elif self._written:
                self._flush()
            else:
                break
        _, problem = self._call("close", self._sink.close)
        watch.close()
        if problem:
            _LOGGER.error("closing the sink %s failed: %s", self.name, problem)

    def _next(self) -> _Entry | None:
        """Return the next delivery, blocking; None: flush what is written, or end the thread."""
        with self._changed:
            while True:
                is_large = 2 * self._unflushed >= self._most
                if self._written and (is_large or time.monotonic() >= self._due):
                    return None
                if self._queue:
                    self._current = self._queue.popleft()
                    return self._current
                if self._written and (self._draining or self._bound.is_wanted):
                    return None
                if self._closing:
                    return None
                self._draining = False
                self._changed.wait(self._due - time.monotonic() if self._written else None)

    def _write(self, entry: _Entry) -> None:
        delivery, entry.delivery = entry.delivery, None
        assert delivery is not None
        result, problem = self._call("write", lambda: self._sink.write(delivery))
        self._current = None
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
        results, problem = self._call("flush", partial(_flushed, self._sink))
        written, self._written = self._written, []
        self._unflushed = 0
        if results is not None and len(results) != len(written):
            problem = f"flush returned {len(results)} results for {len(written)} writes"
        for index, entry in enumerate(written):
            if problem:
                entry.result = CaptureResult("error", problem)
            elif results is not None:
                entry.result = results[index]
            self._report(entry, entry.result)

    def _report(self, entry: _Entry, result: CaptureResult) -> None:
        with self._changed:
            if entry.is_reported:
                return
            entry.is_reported = True
        self._bound.give(entry.size)
        entry.done.set_result(result)


def _flushed(sink: Sink) -> list[CaptureResult] | None:
    returned: Any = sink.flush()
    if returned is None:
        return None
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise TypeError(f"flush returned {kind(returned)}; expected CaptureResults or None")
    results = list(returned)
    for result in results:
        if not isinstance(result, CaptureResult):
            raise TypeError(f"flush returned a list with {kind(result)}; expected CaptureResults")
    return results


def _guarded(call: Callable[[], T]) -> tuple[T | None, str]:
    """Call a method; return its result and its exception's message: the thread must not end."""
    try:
        return call(), ""
    except BaseException as error:
        _LOGGER.debug("a sink raised", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
