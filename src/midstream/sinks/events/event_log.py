"""The events of one process, on their way to all sinks of the setting `events`."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime, timezone
from itertools import count
from typing import Any

import msgspec

from midstream.config.event_sinks import (
    EventSettings,
    JsonLinesSettings,
    KafkaSettings,
    WebhookSettings,
)
from midstream.errors import ConfigError
from midstream.sinks.daemon_threads import begin, in_threads
from midstream.sinks.events.base import EventSink, SinkEvent
from midstream.sinks.events.json_lines import JsonLinesFile, JsonLinesSink
from midstream.sinks.events.kafka import KafkaSink
from midstream.sinks.events.queue import EventCounts, EventQueue
from midstream.sinks.events.webhook import WebhookSink

_LOGGER = logging.getLogger(__name__)
TEXT = "text"
_KEPT = 100  # older files of dead letters, of 64 MiB
_OWN = "guards"  # the name of the webhooks of guards
_MOST_OWN, _OWN_BYTES = 32, 1 << 20  # of them, and bytes of events that wait for each
_MOST_LEFT = 32  # of these queues that are ending


class EventLog:
    """Takes events and gives them to each sink.

    An event is a dict of JSON values. It gets the fields `time` and `id`, `RUN-NUMBER`: RUN is this
    process's, and the numbers are consecutive, so that a receiver sees repeated and missing events.
    """

    def __init__(self, settings: Mapping[str, EventSettings]) -> None:
        """Open the sinks, by kind; none: events are discarded.

        Raises:
            ConfigError: a file cannot be opened, or an environment variable is unset.
            MissingExtraError: the client of Kafka is not installed.
        """
        self._run = uuid.uuid4().hex[:16]
        self._numbers = count(1)
        self._unwritable = 0  # events that have no JSON form
        self._queues: list[EventQueue] = []
        self._lock = threading.Lock()  # held where what follows changes
        # Of webhooks of guards, the last used at the end; those that end; and counts of ended ones.
        self._own: OrderedDict[tuple[str, str, float], EventQueue] = OrderedDict()
        self._left: list[EventQueue] = []
        self._ended: Counter[str] = Counter()
        self._is_closed = False
        try:
            for name, sink_settings in settings.items():
                self._queues.append(_opened(name, sink_settings))
        except BaseException:
            self.close()
            raise

    def put(self, event: Mapping[str, Any], own: tuple[str, str, float] | None = None) -> None:
        """Give an event to the sinks. Waits for none, raises nothing; any thread.

        Args:
            event: JSON values by name.
            own: a webhook for this event besides: the name of its guard, its URL, and the seconds
                of an attempt. It gets the text.
        """
        queues = self._queues
        if own is not None and (queue := self._own_queue(*own)) is not None:
            queues = [*queues, queue]
        if not queues:
            return
        name = f"{self._run}-{next(self._numbers)}"
        whole = {"id": name, "time": datetime.now(timezone.utc).isoformat(), **event}
        try:
            short = msgspec.json.encode({key: whole[key] for key in whole if key != TEXT})
            full = msgspec.json.encode(whole) if TEXT in whole else short
        except (TypeError, ValueError, OverflowError, RecursionError):
            self._unwritable += 1
            _LOGGER.exception("an event is no JSON, and lost")
            return
        now = time.monotonic()
        for queue in queues:
            queue.put(SinkEvent(name, full if queue.settings.text else short, now))

    def _own_queue(self, guard: str, url: str, seconds: float) -> EventQueue | None:
        """Return the queue of a guard's webhook, which is made with its first event; None, and the
        event is counted as dropped, once the log is closed or while too many queues end.
        """
        key = guard, url, seconds
        with self._lock:
            if (queue := self._own.get(key)) is None:
                is_full = len(self._own) >= _MOST_OWN and len(self._left) >= _MOST_LEFT
                if self._is_closed or is_full:
                    self._ended["dropped"] += 1
                    return None
                settings = WebhookSettings(
                    url=url, call_seconds=seconds, close_seconds=seconds, text=True,
                    linger_seconds=0.0, queue_bytes=_OWN_BYTES,
                )  # fmt: skip
                queue = self._own[key] = EventQueue(f"{_OWN}.{guard}", _sink(settings), settings)
                if len(self._own) > _MOST_OWN:
                    _, old = self._own.popitem(last=False)
                    self._left.append(old)
                    begin(lambda: self._retire(old))
            self._own.move_to_end(key)
            return queue

    def _retire(self, queue: EventQueue) -> None:
        """End the queue of a webhook that no guard has used for long, and keep its counts."""
        queue.close()
        with self._lock:
            self._left.remove(queue)
            self._ended.update(asdict(queue.counts))

    @property
    def undelivered(self) -> int:
        """Events of all sinks that were dropped or became dead letters, since the start."""
        queues = sum(counts.undelivered for counts in self.counts.values())
        return queues + self._unwritable * len(self._queues)

    @property
    def counts(self) -> dict[str, EventCounts]:
        """Counts by sink; of all webhooks of guards, if there are any, as `guards`."""
        counts = {queue.name: queue.counts for queue in self._queues}
        with self._lock:
            own = [*self._own.values(), *self._left]
            total = Counter(self._ended)
        if own or total:
            for queue in own:
                total.update(asdict(queue.counts))
            counts[_OWN] = EventCounts(**{key.name: total[key.name] for key in fields(EventCounts)})
        return counts

    def close(self) -> None:
        """Send what waits, and close the sinks, each within its `close_seconds`; all at once."""
        with self._lock:
            self._is_closed = True
            queues = [*self._queues, *self._own.values(), *self._left]
        in_threads(EventQueue.close, queues, len(queues))


def _opened(name: str, settings: EventSettings) -> EventQueue:
    """Return the queue of an opened sink."""
    path = f"midstream.events.{name}"
    try:
        dead_letters = None
        if settings.dead_letters is not None:
            dead_letters = JsonLinesFile(settings.dead_letters, keep=_KEPT)
        return EventQueue(name, _sink(settings), settings, dead_letters)
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be opened: {error}") from None


def _sink(settings: EventSettings) -> EventSink:
    if isinstance(settings, JsonLinesSettings):
        return JsonLinesSink(settings)
    if isinstance(settings, WebhookSettings):
        return WebhookSink(settings)
    assert isinstance(settings, KafkaSettings)
    return KafkaSink(settings)
