"""Writer of a job's results into its store."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

import torch

from midstream.codecs import parse_codec
from midstream.config.sinks import QUEUE_BYTES
from midstream.errors import StoreError
from midstream.lab.jobs.engine import Reply
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.request_ids import LINE, TERMS
from midstream.lab.replay.record import RECORD
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Origin
from midstream.sinks.delivery import DeliveredRows, DeliverySource, Label
from midstream.sinks.queue import QueueTimes, SinkQueue
from midstream.sinks.store_sink import StoreSink
from midstream.sites import Tap

# A job writes whole shards, and has no other purpose than that they are stored.
_CALL_SECONDS, _CLOSE_SECONDS = 600.0, 3600.0


class StoreWriter:
    """Delivers replies to a store sink, which writes in its own thread; `stored` are durable."""

    def __init__(self, job: Job, origin: Origin) -> None:
        sink = StoreSink(job.out, prompts=job.keep_prompts)
        sink.open(origin)
        self._queue = SinkQueue(
            "store", sink, QUEUE_BYTES, QueueTimes(job.flush_seconds, _CALL_SECONDS, _CLOSE_SECONDS)
        )
        self._pending: deque[Future[CaptureResult]] = deque()
        self._tag, self._plan, self._terms = job.tag, job.plan, job.terms
        self._origin, self._codec = origin, parse_codec(job.codec)
        self._dtype: torch.dtype = getattr(torch, origin.dtype)
        self.stored = 0

    def nbytes(self, counts: Mapping[Tap, int]) -> int:
        """Return the size of this many encoded rows by tap, in bytes."""
        return sum(
            count * self._codec.row_bytes(self._origin.width(tap), self._dtype)
            for tap, count in counts.items()
        )

    def put(self, request: str, reply: Reply) -> tuple[int, int]:
        """Queue a reply, blocking while the queue is full; return its rows and encoded bytes."""
        rows = reply.activations
        counts = rows.counts()
        count, nbytes = sum(counts.values()), self.nbytes(counts)
        source = DeliverySource(
            request_id=reply.receipt.request_id,
            completion=0,
            completions=1,
            prompt=reply.prompt,
            prompt_token_ids=reply.prompt_token_ids,
            text=reply.text,
            generated_token_ids=reply.generated_token_ids,
            finish_reason=reply.finish_reason,
        )
        metadata = {LINE: reply.line, TERMS: self._terms, **reply.parts.to_metadata()}
        if reply.record is not None:
            metadata[RECORD] = reply.record
        delivery = source.delivery(
            Label(request, self._tag, metadata),
            self._plan,
            reply.receipt,
            DeliveredRows(rows),
        )
        self._pending.append(self._queue.put(delivery, nbytes))
        return count, nbytes

    def check(self) -> None:
        """Update `stored`."""
        while self._pending and self._pending[0].done():
            result = self._pending.popleft().result()
            if result.status != "ok":
                raise StoreError(result.reason.removeprefix("StoreError: "))
            self.stored += 1

    def drain(self) -> None:
        """Start writing all queued replies, without waiting for a full shard."""
        self._queue.drain()

    def close(self) -> None:
        """Write all queued replies and wait until they are written."""
        self._queue.close()
        self.check()
