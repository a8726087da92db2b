"""Receipts in vLLM's tracing spans, which are made later, once the receipt exists."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from midstream.results.receipt import Receipt
from midstream.runtime.vllm.attributes import SPANS_OF_REQUEST

# Attributes to add to the span that is being made, and its end in nanoseconds.
_ADDED: ContextVar[tuple[Mapping[str, Any], int] | None] = ContextVar(
    "midstream_span", default=None
)


@dataclass(frozen=True, slots=True)
class DelayedSpan:
    """A span that vLLM has not made yet."""

    completion: int  # index
    make: Callable[[], object]
    end: int  # nanoseconds since the epoch
    context: contextvars.Context

    def finish(self, receipt: Receipt | None) -> None:
        """Make the span, with what the receipt of its completion says."""
        self.context.run(self._make, {} if receipt is None else attributes_of(receipt))

    def _make(self, attributes: Mapping[str, Any]) -> None:
        # What is begun while the span is made keeps the context, and may make other spans.
        token = _ADDED.set((attributes, self.end))
        try:
            self.make()
        finally:
            _ADDED.reset(token)


def delay_spans(processor: Any, spans_of: Callable[[str], list[DelayedSpan] | None]) -> None:
    """Delay the spans of requests with a plan until their receipts exist. `spans_of` returns, for
    vLLM's id of a request, the list to which its span is appended; None: the request has no plan.
    """
    SPANS_OF_REQUEST.set(processor, spans_of)


def do_tracing(original: Callable[..., Any], processor: Any, output: Any, *rest: Any) -> Any:
    """Replace the method that makes the span of a request; `rest` begins with its state."""
    spans_of = SPANS_OF_REQUEST.get(processor)
    state = rest[0]
    spans = None if spans_of is None else spans_of(state.request_id)
    if spans is None:
        return original(processor, output, *rest)
    spans.append(
        DelayedSpan(
            state.request_index,
            lambda: original(processor, output, *rest),
            time.time_ns(),
            contextvars.copy_context(),
        )
    )
    return None


def instrument_manual(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Replace vLLM's function that sends a span: add attributes, and the end of a delayed one."""
    added = _ADDED.get()
    if added is not None:
        attributes, end = added
        named["attributes"] = {**(named.get("attributes") or {}), **attributes}
        named["end_time"] = end
    return original(*args, **named)


def attributes_of(receipt: Receipt) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "midstream.receipt.status": receipt.status,
        "midstream.captured.rows": sum(count.actual for count in receipt.captured),
        "midstream.captured.dropped": receipt.dropped,
        "midstream.probes.scores": sum(count.actual for count in receipt.probed),
    }
    if receipt.edited is not None:
        attributes["midstream.edits.applied"] = receipt.edited.applied
        attributes["midstream.edits.cached"] = receipt.edited.cached
        attributes["midstream.edits.tokens"] = receipt.edited.tokens
    if receipt.kept:
        attributes["midstream.sinks"] = [f"{sink}: {kept.status}" for sink, kept in receipt.kept]
    return attributes
