"""What a sink of events is: it sends batches, in the thread of its queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class SinkEvent(NamedTuple):
    """An event on its way to one sink."""

    id: str  # unique; consecutive numbers of one process, so that a gap is a lost event
    data: bytes  # a JSON object in UTF-8, without a line break
    put_at: float  # monotonic seconds


class SendResult(NamedTuple):
    """How an attempt to send a batch ended."""

    problem: str = ""  # empty: all of it was received
    may_retry: bool = False  # whether another attempt may succeed
    retry_after: float = 0.0  # seconds before which the receiver wants no other
    left: Sequence[SinkEvent] | None = None  # what was not received; None: with a problem all of it


DELIVERED = SendResult()


class EventSink(ABC):
    """A sink of events. All calls are made by one thread, but `close` after a call that hangs."""

    # Longest waits in seconds after the first failed attempt, which doubles, and at all.
    backoff_seconds = 0.5
    most_backoff_seconds = 30.0

    @abstractmethod
    def send(self, batch: Sequence[SinkEvent], seconds: float) -> SendResult:
        """Send events, within `seconds`. A repeated attempt has the same ids.

        Raises:
            Exception: nothing was received, and another attempt may succeed.
        """

    @abstractmethod
    def close(self) -> None:
        """Free connections and files."""
