"""Puts replies into the store, and says which of them are there for good."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import torch

from midstream.codecs import parse_codec
from midstream.config.sinks import QUEUE_BYTES
from midstream.errors import StoreError
from midstream.jobs.engine import Reply
from midstream.jobs.job import Job
from midstream.jobs.request_ids import LINE, TERMS
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Origin
from midstream.sinks.queue import SinkQueue
from midstream.sinks.store_sink import StoreSink


class StoreWriter:
    """Hands replies to the store's sink, which writes them in a thread of its own.

    Attributes:
        stored: how many are in the store for good.
        row_bytes: that a row takes, encoded.
    """

    def __init__(self, job: Job, origin: Origin) -> None:
        """Args:
        job: what is asked for.
        origin: what the rows come from.

        Raises:
            StoreError: the store cannot be written to.
        """
        sink = StoreSink(job.out, prompts=job.keep_prompts)
        sink.open(origin)
        self._queue = SinkQueue("store", sink, QUEUE_BYTES, job.flush_seconds)
        self._told: deque[Future[CaptureResult]] = deque()
        self._tag, self._plan, self._terms = job.tag, job.plan, job.terms
        dtype: torch.dtype = getattr(torch, origin.dtype)
        self.row_bytes = parse_codec(job.codec).row_bytes(origin.hidden_size, dtype)
        self.stored = 0

    def put(self, request: str, reply: Reply) -> tuple[int, int]:
        """Hands over a reply; waits while too much waits to be written.

        Args:
            request: the id under which it is kept.
            reply: what came.

        Returns:
            How many rows it has, and how many bytes these are.
        """
        rows = reply.activations
        count = sum(rows.counts().values())
        nbytes = count * self.row_bytes
        delivery = Delivery(
            name=request,
            tag=self._tag,
            metadata={LINE: reply.line, TERMS: self._terms},
            request_id=reply.receipt.request_id,
            completion=0,
            completions=1,
            prompt=reply.prompt,
            prompt_token_ids=reply.prompt_token_ids,
            prompt_tokens=reply.receipt.prompt_tokens,
            text=reply.text,
            generated_token_ids=reply.generated_token_ids,
            finish_reason=reply.finish_reason,
            plan=self._plan,
            receipt=reply.receipt,
            activations=rows,
        )
        self._told.append(self._queue.put(delivery, nbytes))
        return count, nbytes

    def check(self) -> None:
        """Counts what is in the store by now.

        Raises:
            StoreError: something could not be written. Those rows are let go.
        """
        while self._told and self._told[0].done():
            result = self._told.popleft().result()
            if result.status != "ok":
                raise StoreError(result.reason.removeprefix("StoreError: "))
            self.stored += 1

    def drain(self) -> None:
        """Has what there is written without waiting for more."""
        self._queue.drain()

    def close(self) -> None:
        """Writes what there is, and waits for that. Raises as `check` does."""
        self._queue.close()
        self.check()
