"""Queue before one sink of events: putting never waits, and every event that it took is received,
in the file of dead letters, or counted as lost.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from midstream.config.event_sinks import EventSettings
from midstream.sinks.daemon_threads import begin
from midstream.sinks.events.base import EventSink, SendResult, SinkEvent
from midstream.sinks.events.json_lines import JsonLinesFile

_LOGGER = logging.getLogger(__name__)
_IDLE_SECONDS = 5.0  # interval of looks of a thread without work
_LOG_SECONDS = 60.0  # interval of lines about dropped events
_DEAD_SECONDS = 5.0  # longest time to write dead letters as the queue closes
_SETTLE_SECONDS = 0.5  # longest time from an attempt's limit to its end
_LEAST_SECONDS = 0.1  # time of an attempt that begins as the queue closes
_DOUBLED = 16  # times that the wait after an attempt doubles, at most


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Events of one queue since its start, which are `put` in all."""

    delivered: int  # received by the sink
    dropped: int  # neither received nor in the file of dead letters
    dead_letters: int  # in the file of dead letters; the sink may have received some
    waiting: int

    @property
    def undelivered(self) -> int:
        """Events of which it is not known that the sink received them."""
        return self.dropped + self.dead_letters


class EventQueue:
    """Queue of one sink, which its thread sends batch by batch, in order."""

    def __init__(
        self,
        name: str,
        sink: EventSink,
        settings: EventSettings,
        dead_letters: JsonLinesFile | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self._sink = sink
        self._dead_letters = dead_letters
        self._events: deque[SinkEvent] = deque()
        self._sending: Sequence[SinkEvent] = ()  # what of the first events the thread sends
        self._lost = 0  # events that are given up, and not counted yet
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._close_at = float("inf")  # monotonic time from which nothing more is tried
        self._is_closing = False
        self._close_lock = threading.Lock()  # a second call ends after the first
        self._is_abandoned = False  # the thread did not end in time: what it does counts no more
        self._logged_at = -_LOG_SECONDS
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, event: SinkEvent) -> None:
        """Take an event, or count it as dropped if the queue is full or closed. Never waits for
        the sink; any thread.
        """
        with self._changed:
            if self._is_closing or self._bytes + len(event.data) > self.settings.queue_bytes:
                self._counts["dropped"] += 1
            else:
                self._events.append(event)
                self._bytes += len(event.data)
                if len(self._events) in (1, self.settings.batch_events):
                    self._changed.notify()
                if self._thread is None:
                    self._start()
                return
        self._log_drop("it is closed" if self._is_closing else "its queue is full")

    @property
    def counts(self) -> EventCounts:
        with self._changed:
            return EventCounts(
                self._counts["delivered"],
                self._counts["dropped"],
                self._counts["dead"],
                len(self._events) + self._lost,
            )

    def close(self) -> None:
        """Send what waits, within the setting `close_seconds`, and close the sink. What is left
        becomes dead letters, or is counted as dropped. Nothing in a fork.
        """
        if os.getpid() != self._process:
            return
        with self._close_lock:
            if not self._is_closing:
                self._close()

    def _close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._close_at = time.monotonic() + self.settings.close_seconds
            thread = self._thread
            self._changed.notify()
        if thread is None:
            self._sink.close()
        else:
            thread.join(self.settings.close_seconds + _SETTLE_SECONDS)
            self._abandon()
            if self._lost:  # the thread writes dead letters
                thread.join(_DEAD_SECONDS)
        if self._dead_letters is not None and not self._lost:
            self._dead_letters.close()

    def _start(self) -> None:
        # A daemon does not keep the process alive; the queue's owner closes it.
        name = f"midstream events {self.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._next():
            self._deliver()
        try:
            self._sink.close()
        except Exception:
            _LOGGER.exception("closing the event sink %s failed", self.name)

    def _next(self) -> bool:
        """Wait for the next batch, which stays in the queue; return False at the end."""
        with self._changed:
            while not self._is_abandoned:
                if self._events:
                    due = self._events[0].put_at + self.settings.linger_seconds
                    wait = due - time.monotonic()
                    if (
                        self._is_closing
                        or wait <= 0
                        or len(self._events) >= self.settings.batch_events
                    ):
                        first = islice(self._events, self.settings.batch_events)
                        self._sending = tuple(first)
                        return True
                    self._changed.wait(wait)
                elif self._is_closing:
                    return False
                else:
                    self._changed.wait(_IDLE_SECONDS)
        return False

    def _deliver(self) -> None:
        """Send the batch, again and again, until it is received or given up."""
        attempts = 0
        while self._sending and not self._is_abandoned:
            outcome = self._attempt(self._sending)
            attempts += 1
            if not outcome.problem:
                self._settle((), "")
                return
            left = self._sending if outcome.left is None else outcome.left
            until = min(self._sending[0].put_at + self.settings.retry_seconds, self._close_at)
            if not outcome.may_retry or time.monotonic() >= until:
                self._settle(left, outcome.problem)
                return
            if len(left) < len(self._sending):
                self._keep(left)
            self._wait(max(self._backoff(attempts), outcome.retry_after), until)

    def _attempt(self, batch: Sequence[SinkEvent]) -> SendResult:
        left = max(self._close_at - time.monotonic(), _LEAST_SECONDS)
        try:
            return self._sink.send(batch, min(self.settings.call_seconds, left))
        except Exception as error:  # noqa: BLE001 - the batch is tried again, or given up
            problem = error.strerror if isinstance(error, OSError) else ""
            return SendResult(problem or f"{type(error).__name__}: {error}", may_retry=True)

    def _backoff(self, attempts: int) -> float:
        """Return the seconds to wait after an attempt: evenly from 0 to what doubles each time."""
        most = self._sink.backoff_seconds * 2 ** min(attempts - 1, _DOUBLED)
        return random.uniform(0, min(most, self._sink.most_backoff_seconds))

    def _wait(self, seconds: float, until: float) -> None:
        """Wait, but not beyond `until`; a queue that begins to close tries once more at once."""
        was_closing = self._is_closing
        with self._changed:
            end = min(time.monotonic() + seconds, until)
            while (rest := end - time.monotonic()) > 0 and self._is_closing == was_closing:
                self._changed.wait(rest)

    def _keep(self, left: Sequence[SinkEvent]) -> None:
        """Remove from the batch what was received."""
        with self._changed:
            if not self._is_abandoned:
                self._remove(len(self._sending))
                self._counts["delivered"] += len(self._sending) - len(left)
                self._events.extendleft(reversed(left))
                self._bytes += sum(len(event.data) for event in left)
                self._sending = tuple(left)

    def _settle(self, lost: Sequence[SinkEvent], problem: str) -> None:
        """End the batch, of which all but `lost` was received."""
        with self._changed:
            if self._is_abandoned:
                return
            self._counts["delivered"] += len(self._sending) - len(lost)
            self._remove(len(self._sending))
            self._sending = ()
            self._lost = len(lost)
        if lost:
            self._give_up(lost, problem)

    def _remove(self, count: int) -> None:
        for _ in range(count):
            self._bytes -= len(self._events.popleft().data)

    def _abandon(self) -> None:
        """Give up what the thread has not settled in time."""
        with self._changed:
            self._is_abandoned = True
            left = tuple(self._events)
            self._events.clear()
            self._bytes = 0
            self._lost += len(left)
            self._changed.notify()
        if left:
            limit = f"{self.settings.close_seconds:g} s (`close_seconds`)"
            self._give_up(left, f"it was closed, and has not received them within {limit}")

    def _give_up(self, events: Sequence[SinkEvent], problem: str) -> None:
        """Write events to the file of dead letters; without, or if that fails, they are dropped."""
        key, place = "dropped", "lost; the setting `dead_letters` would keep them"
        if self._dead_letters is not None:
            lines = [event.data for event in events]
            dead_letters = self._dead_letters
            # In a thread of its own: a file system may not answer.
            call = begin(lambda: dead_letters.append(lines, _DEAD_SECONDS))
            try:
                call.result(_DEAD_SECONDS)
                key, place = "dead", "dead letters"
            except Exception as error:  # noqa: BLE001 - told, and counted
                problem_there = str(error) or type(error).__name__
                place = f"lost; the dead letters cannot be written: {problem_there}"
                if not call.done():
                    self._dead_letters = None  # the thread that writes still has the file
        with self._changed:
            self._counts[key] += len(events)
            self._lost -= len(events)
        _LOGGER.error(
            "the event sink %s: %s; %d events are %s", self.name, problem, len(events), place
        )

    def _log_drop(self, why: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            total = self._counts["dropped"]
            _LOGGER.error("the event sink %s: %s; %d events are lost so far", self.name, why, total)
