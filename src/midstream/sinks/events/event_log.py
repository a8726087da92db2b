"""The events of one process, on their way to all sinks of the setting `events`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
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
from midstream.sinks.daemon_threads import in_threads
from midstream.sinks.events.base import EventSink, SinkEvent
from midstream.sinks.events.json_lines import JsonLinesFile, JsonLinesSink
from midstream.sinks.events.kafka import KafkaSink
from midstream.sinks.events.queue import EventCounts, EventQueue
from midstream.sinks.events.webhook import WebhookSink

_LOGGER = logging.getLogger(__name__)
TEXT = "text"
_KEPT = 100  # older files of dead letters, of 64 MiB


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
        try:
            for name, sink_settings in settings.items():
                self._queues.append(_opened(name, sink_settings))
        except BaseException:
            self.close()
            raise

    @property
    def wants_text(self) -> bool:
        """Whether a sink keeps the text that a guard acted on."""
        return any(queue.settings.text for queue in self._queues)

    def put(self, event: Mapping[str, Any]) -> None:
        """Give an event to the sinks. Waits for none, raises nothing; any thread."""
        if not self._queues:
            return
        name = f"{self._run}-{next(self._numbers)}"
        whole = {"id": name, "time": datetime.now(timezone.utc).isoformat(), **event}
        try:
            short = msgspec.json.encode({key: whole[key] for key in whole if key != TEXT})
            full = msgspec.json.encode(whole) if self.wants_text and TEXT in whole else short
        except (TypeError, ValueError, OverflowError, RecursionError):
            self._unwritable += 1
            _LOGGER.exception("an event is no JSON, and lost")
            return
        now = time.monotonic()
        for queue in self._queues:
            queue.put(SinkEvent(name, full if queue.settings.text else short, now))

    @property
    def undelivered(self) -> int:
        """Events of all sinks that were dropped or became dead letters, since the start."""
        queues = sum(queue.counts.undelivered for queue in self._queues)
        return queues + self._unwritable * len(self._queues)

    @property
    def counts(self) -> dict[str, EventCounts]:
        """Counts by sink."""
        return {queue.name: queue.counts for queue in self._queues}

    def close(self) -> None:
        """Send what waits, and close the sinks, each within its `close_seconds`; all at once."""
        in_threads(EventQueue.close, self._queues, len(self._queues))


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
