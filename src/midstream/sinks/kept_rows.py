"""Sink of the server-wide captures without a sink of their own: rows in memory until collected."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

from midstream.results.activations import Activations
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink

# Name of the sink. Only server-wide captures use it.
KEPT = "kept"
KEPT_BYTES = 1 << 30


class Collected(tuple[Delivery, ...]):
    """Kept rows of a server-wide capture, one delivery per completion, oldest first."""

    dropped: int = 0
    tag: str = ""


@dataclass(slots=True)
class _Kept:
    deliveries: deque[tuple[Delivery, int]] = field(default_factory=deque)
    nbytes: int = 0
    dropped: int = 0


class KeptRows(Sink):
    """Keeps deliveries by their tag; when full, drops the oldest and counts them. Thread-safe."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most = most_bytes
        self._by_tag: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def begin(self, tag: str) -> None:
        """Keep rows for a tag from now on, beginning without any."""
        with self._lock:
            self._by_tag[tag] = _Kept()

    def end(self, tag: str) -> None:
        """Discard what is kept for a tag, and rows that arrive for it later."""
        with self._lock:
            self._by_tag.pop(tag, None)

    def take(self, tag: str, most_bytes: int | None = None) -> Collected:
        """Return what is kept for a tag, at least one, oldest first, and keep it no longer."""
        deliveries: list[Delivery] = []
        nbytes = 0
        with self._lock:
            kept = self._by_tag[tag]
            while kept.deliveries:
                delivery, size = kept.deliveries[0]
                if deliveries and most_bytes is not None and nbytes + size > most_bytes:
                    break
                kept.deliveries.popleft()
                kept.nbytes -= size
                nbytes += size
                deliveries.append(delivery)
            collected = Collected(deliveries)
            collected.dropped, kept.dropped = kept.dropped, 0
        collected.tag = tag
        return collected

    def put_back(self, collected: Collected) -> None:
        """Keep again what `take` returned, unless the rows of its tag are discarded now."""
        with self._lock:
            kept = self._by_tag.get(collected.tag)
            if kept is None:
                return
            sized = [(delivery, _size(delivery.activations)) for delivery in collected]
            kept.deliveries.extendleft(reversed(sized))
            kept.nbytes += sum(size for _, size in sized)
            kept.dropped += collected.dropped
            self._drop(kept)

    def usage(self, tag: str) -> dict[str, int]:
        """Return how many completions are kept for a tag and were dropped, and the bytes kept."""
        with self._lock:
            kept = self._by_tag[tag]
            return {
                "completions": len(kept.deliveries),
                "bytes": kept.nbytes,
                "dropped": kept.dropped,
            }

    def write(self, delivery: Delivery) -> CaptureResult | None:
        rows = delivery.activations.copy()
        size = _size(rows)
        with self._lock:
            kept = self._by_tag.get(delivery.tag)
            if kept is None:
                return None  # cleared while the request ran
            kept.deliveries.append((replace(delivery, activations=rows), size))
            kept.nbytes += size
            self._drop(kept)
        return None

    def _drop(self, kept: _Kept) -> None:
        while kept.nbytes > self._most:
            _, freed = kept.deliveries.popleft()
            kept.nbytes -= freed
            kept.dropped += 1


def _size(rows: Activations) -> int:
    return sum(rows.encoded(*tap).nbytes for tap in rows)
