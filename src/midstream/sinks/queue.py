"""The way to one sink: a queue, and a thread that writes what comes, flushes and tells."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink
from midstream.sinks.byte_budget import ByteBudget

_LOGGER = logging.getLogger(__name__)

# How long a caller who goes on with other work is left without an answer.
PATIENCE = 2.0

T = TypeVar("T")
_FOREVER = float("inf")


@dataclass(slots=True)
class _Entry:
    """One delivery on its way.

    Attributes:
        delivery: None once it is written: its rows may go.
        size: how many bytes it takes of the bound.
        patience: for how many seconds after it is written its caller would wait for a flush.
        told: gets the result.
        result: what the sink said of the write.
    """

    delivery: Delivery | None
    size: int
    patience: float
    told: Future[CaptureResult] = field(default_factory=Future)
    result: CaptureResult = field(default_factory=CaptureResult)


class SinkQueue:
    """One sink's. Deliveries are written in the order in which they come, and flushed together:
    when the first of their callers has lost patience, when there is no room for more, or when
    nothing else will come.
    """

    def __init__(self, name: str, sink: Sink, most_bytes: int, patience: float = PATIENCE) -> None:
        """Args:
        name: of the sink.
        sink: opened.
        most_bytes: of deliveries that its caller was not told of yet.
        patience: for how many seconds what is put may wait for a flush.
        """
        self.name = name
        self._sink = sink
        self._most = most_bytes
        self._patience = patience
        self._bound = ByteBudget(most_bytes)
        self._queue: deque[_Entry] = deque()
        self._written: list[_Entry] = []
        self._unflushed = 0  # bytes of what is written
        self._due = 0.0  # when what is written is to be flushed
        self._draining = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """Hands over a delivery when there is room for it, and waits until there is. Others may
        join its flush until patience has an end, room is needed, or the queue is drained.
        """
        room = self._take(size)
        try:
            room.result()
        except BaseException:
            self._withdraw(room, size)
            raise
        return self._append(_Entry(delivery, size, self._patience))

    async def put_soon(self, delivery: Delivery, size: int) -> Future[CaptureResult]:
        """As `put`, for an event loop. For the last of a completion's deliveries somebody waits:
        others may join its flush as long as the sink says.
        """
        room = self._take(size)
        try:
            await asyncio.wrap_future(room)
        except BaseException:
            self._withdraw(room, size)
            raise
        patience = self._sink.group_seconds if delivery.is_last else self._patience
        return self._append(_Entry(delivery, size, patience))

    def put_empty(self, delivery: Delivery) -> None:
        """Hands over a delivery without rows, which needs no room; nobody is told of it."""
        self._append(_Entry(delivery, 0, self._patience))

    @property
    def unwritten(self) -> int:
        """Bytes of deliveries whose caller was not told of them yet."""
        return self._bound.used

    def drain(self) -> None:
        """Has all that was put written and flushed without waiting for more."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def close(self) -> None:
        """Writes and flushes what there is, closes the sink and waits for that. In a process that
        was forked it does nothing: all of that is its parent's.
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
        # A collector of garbage may run this in any thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _take(self, size: int) -> Future[None]:
        room = self._bound.take(size)
        if not room.done():
            with self._changed:
                self._changed.notify()  # what is written must be flushed to make room
        return room

    def _withdraw(self, room: Future[None], size: int) -> None:
        """Whoever waited for room has gone."""
        if not room.cancel():
            self._bound.give(size)

    def _append(self, entry: _Entry) -> Future[CaptureResult]:
        entry.told.set_running_or_notify_cancel()  # nobody can cancel it from here on
        with self._changed:
            if self._closing:
                self._bound.give(entry.size)
                entry.told.set_result(CaptureResult("error", "the sink is closed"))
                return entry.told
            self._queue.append(entry)
            if self._thread is None:
                self._start()
            self._changed.notify()
        return entry.told

    def _start(self) -> None:
        # A daemon: it must not keep the process alive; whoever made the queue closes it.
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
            _LOGGER.error("sink %s could not be closed: %s", self.name, problem)

    def _next(self) -> _Entry | None:
        """What is to be written next. None: what is written is to be flushed, if anything is; if
        not, this is the end.
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
        if problem:
            self._tell(entry, CaptureResult("error", problem))
            return
        if result is not None:
            entry.result = result
        due = time.monotonic() + entry.patience
        self._due = min(self._due, due) if self._written else due
        self._written.append(entry)
        self._unflushed += entry.size

    def _flush(self) -> None:
        results, problem = _guarded(self._sink.flush)
        written, self._written = self._written, []
        self._unflushed = 0
        if results is not None and len(results) != len(written):
            problem = f"flush gave {len(results)} results for {len(written)} writes"
        for nth, entry in enumerate(written):
            if problem:
                entry.result = CaptureResult("error", problem)
            elif results is not None:
                entry.result = results[nth]
            self._tell(entry, entry.result)

    def _tell(self, entry: _Entry, result: CaptureResult) -> None:
        self._bound.give(entry.size)
        entry.told.set_result(result)


def _guarded(call: Callable[[], T]) -> tuple[T | None, str]:
    """What a call of the sink gave, and what it raised, for those whose rows they were: it must not
    end the thread on which all others wait.
    """
    try:
        return call(), ""
    except BaseException as error:
        _LOGGER.debug("a sink raised", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
