"""Sink `kafka`: a message for each event, by the package confluent-kafka."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from midstream.config.event_sinks import KafkaSettings, options_of
from midstream.errors import ConfigError, MissingExtraError
from midstream.sinks.events.base import DELIVERED, EventSink, SendResult, SinkEvent

# Of an attempt's time, for the client's own reports after its limit.
_MARGIN = 0.8


class KafkaSink(EventSink):
    """Produces events with their ids as keys. All in-sync replicas must have a message, and the
    client's own repetitions write it once.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        """Make the client, which connects by itself.

        Raises:
            MissingExtraError: the package confluent-kafka is not installed.
            ConfigError: an environment variable is unset, or an option that the client rejects.
        """
        MissingExtraError.require("confluent_kafka", "the event sink kafka")
        from confluent_kafka import KafkaException, Producer

        options = {
            **options_of(settings),
            "bootstrap.servers": settings.servers,
            "acks": "all",
            "enable.idempotence": True,
            "message.timeout.ms": max(1, int(settings.call_seconds * _MARGIN * 1000)),
        }
        try:
            self._producer: Any = Producer(options)
        except (KafkaException, TypeError) as error:
            raise ConfigError(f"midstream.events.kafka.options: {error}") from None
        self._topic = settings.topic

    def send(self, batch: Sequence[SinkEvent], seconds: float) -> SendResult:
        left = dict(enumerate(batch))
        problems: list[str] = []
        for index, event in enumerate(batch):
            report = partial(_report, left, problems, index)
            try:
                self._producer.produce(
                    self._topic, event.data, event.id.encode(), on_delivery=report
                )
            except BufferError:  # its own queue is full
                break
        self._producer.flush(seconds)
        if not left:
            return DELIVERED
        problem = problems[0] if problems else f"no acknowledgement within {seconds:g} s"
        # Those of which no report came may have been written: they are repeated too.
        return SendResult(problem, may_retry=True, left=tuple(left.values()))

    def close(self) -> None:
        self._producer.flush(0)


def _report(
    left: dict[int, SinkEvent], problems: list[str], index: int, error: object, message: object
) -> None:
    """Take the client's report on one message."""
    if error is None:
        left.pop(index, None)
    else:
        problems.append(str(error))
