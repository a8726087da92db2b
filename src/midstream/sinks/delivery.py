"""Building deliveries, and putting them into the queues of sinks."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from midstream.plan import Plan
from midstream.results.activations import Activations
from midstream.results.receipt import CaptureResult, Receipt
from midstream.sinks.base import Delivery
from midstream.sinks.queue import SinkQueue
from midstream.sites import Tap

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Label:
    """Under what rows are delivered; see `Delivery`."""

    name: str
    tag: str
    metadata: Mapping[str, object]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class DeliveredRows:
    """The rows of a delivery, all of a completion's or a piece; see `Delivery`."""

    activations: Activations
    readouts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    piece: int = 0
    is_last: bool = True
    return_: str = "gathered"
    ranks: Mapping[Tap, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class DeliverySource:
    """A completion whose rows are delivered; see `Delivery`."""

    request_id: str
    completion: int
    completions: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    text: str
    generated_token_ids: tuple[int, ...]
    finish_reason: str | None

    def delivery(
        self, label: Label, plan: Plan | None, receipt: Receipt, rows: DeliveredRows
    ) -> Delivery:
        """Return a delivery of rows of this completion; see `Delivery` for the arguments."""
        return Delivery(
            name=label.name,
            tag=label.tag,
            metadata=label.metadata,
            request_id=self.request_id,
            completion=self.completion,
            completions=self.completions,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_tokens=receipt.prompt_tokens,
            text=self.text,
            generated_token_ids=self.generated_token_ids,
            finish_reason=self.finish_reason,
            plan=plan,
            receipt=receipt,
            activations=rows.activations,
            readouts=rows.readouts,
            piece=rows.piece,
            is_last=rows.is_last,
            return_=rows.return_,
            ranks=rows.ranks,
            layout=label.layout,
        )


@dataclass(frozen=True, slots=True)
class SinkPut:
    """A delivery for the queue of one sink."""

    sink: str
    delivery: Delivery
    size: int  # of its rows in bytes


# Yields what to put, and is sent the future of each result: for callers that block while a queue is
# full, and for event loops.
Puts = Generator[SinkPut, Future[CaptureResult], T]


class Queues(Protocol):
    """The queues of an engine's sinks."""

    def queue(self, name: str) -> SinkQueue:
        """Return the queue of a sink."""


def run_puts(puts: Puts[T], sinks: Queues) -> T:
    """Return the result of `puts`. Blocks while a queue is full."""
    try:
        put = next(puts)
        while True:
            put = puts.send(sinks.queue(put.sink).put(put.delivery, put.size))
    except StopIteration as end:
        result: T = end.value
        return result


async def run_puts_soon(puts: Puts[T], sinks: Queues) -> T:
    """Return the result of `puts`. Waits on the event loop while a queue is full."""
    try:
        put = next(puts)
        while True:
            put = puts.send(await sinks.queue(put.sink).put_soon(put.delivery, put.size))
    except StopIteration as end:
        result: T = end.value
        return result
