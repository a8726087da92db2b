"""Sink of the server-wide captures without a sink of their own: rows in memory until collected."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink

# Name of the sink. Only server-wide captures use it.
KEPT = "kept"
KEPT_BYTES = 1 << 30


class Collected(tuple[Delivery, ...]):
    """Rows of a server-wide capture that were kept, one delivery per completion, oldest first.

    Attributes:
        dropped: number of completions dropped since the last collection, because the memory for
            kept rows was full.
    """

    dropped: int = 0


@dataclass(slots=True)
class _Kept:
    """What is kept for one name; the sizes are in bytes."""

    deliveries: deque[tuple[Delivery, int]] = field(default_factory=deque)
    nbytes: int = 0
    dropped: int = 0


class KeptRows(Sink):
    """Keeps deliveries by their tag, the name of the server-wide capture. Thread-safe.

    When the memory is full, the oldest deliveries of the same name are dropped and counted.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        """Args:
        most_bytes: limit for the rows of each name, in bytes.
        """
        self._most = most_bytes
        self._by_name: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        """Keep rows for a name from now on, beginning without any."""
        with self._lock:
            self._by_name[name] = _Kept()

    def end(self, name: str) -> None:
        """Discard what is kept for a name, and rows that arrive for it later."""
        with self._lock:
            self._by_name.pop(name, None)

    def take(self, name: str, most_bytes: int | None = None) -> Collected:
        """Return what is kept for a name, oldest first, and keep it no longer.

        Args:
            name: the name.
            most_bytes: limit for the rows, in bytes; one delivery may exceed it. None: no limit.
        """
        found: list[Delivery] = []
        nbytes = 0
        with self._lock:
            kept = self._by_name[name]
            while kept.deliveries:
                delivery, size = kept.deliveries[0]
                if found and most_bytes is not None and nbytes + size > most_bytes:
                    break
                kept.deliveries.popleft()
                kept.nbytes -= size
                nbytes += size
                found.append(delivery)
            collected = Collected(found)
            collected.dropped, kept.dropped = kept.dropped, 0
        return collected

    def usage(self, name: str) -> dict[str, int]:
        """Return how many completions are kept for a name and were dropped, and the bytes kept."""
        with self._lock:
            kept = self._by_name[name]
            return {
                "completions": len(kept.deliveries),
                "bytes": kept.nbytes,
                "dropped": kept.dropped,
            }

    def write(self, delivery: Delivery) -> CaptureResult | None:
        rows = delivery.activations.copy()
        size = sum(rows.encoded(*tap).nbytes for tap in rows)
        with self._lock:
            kept = self._by_name.get(delivery.tag)
            if kept is None:
                return None  # cleared while the request ran
            kept.deliveries.append((replace(delivery, activations=rows), size))
            kept.nbytes += size
            while kept.nbytes > self._most:
                _, freed = kept.deliveries.popleft()
                kept.nbytes -= freed
                kept.dropped += 1
        return None
