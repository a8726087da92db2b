"""What vLLM's spans say of requests that ask for something, where its tracing is on.

vLLM makes a request's span when its last token is there, which is before its receipt is. Such a
span is made later, and ends when it would have.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.results.receipt import Receipt

if TYPE_CHECKING:
    from midstream.runtime.frontend.call import GenerateCall

_ATTRIBUTE = "midstream_order_of"
# What the span that is being made says besides, and when it ends.
_MORE: ContextVar[tuple[Mapping[str, Any], int] | None] = ContextVar("midstream_span", default=None)


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """A span that is still to be made.

    Attributes:
        completion: whose, by its index.
        make: makes it.
        end: when it ends, in nanoseconds since the epoch.
        context: in which it is made.
    """

    completion: int
    make: Callable[[], object]
    end: int
    context: contextvars.Context

    def tell(self, receipt: Receipt | None) -> None:
        """Makes the span.

        Args:
            receipt: of its completion; None: there is none.
        """
        self.context.run(self._make, {} if receipt is None else attributes_of(receipt))

    def _make(self, attributes: Mapping[str, Any]) -> None:
        _MORE.set((attributes, self.end))
        self.make()


def hold(processor: Any, order_of: Callable[[str], GenerateCall | None]) -> None:
    """From now on the spans of requests that ask for something wait for their receipts.

    Args:
        processor: vLLM's output processor of one engine.
        order_of: gives what a request asks for, by vLLM's id.
    """
    setattr(processor, _ATTRIBUTE, order_of)


def do_tracing(original: Callable[..., Any], processor: Any, output: Any, *rest: Any) -> Any:
    """In place of the method by which vLLM's output processor makes the span of a request.

    Args:
        original: that method.
        processor: it.
        output: of the engine core.
        *rest: the state of the request, and statistics.
    """
    order_of = getattr(processor, _ATTRIBUTE, None)
    state = rest[0]
    order = None if order_of is None else order_of(state.request_id)
    if order is None:
        return original(processor, output, *rest)
    order.spans.append(
        HeldSpan(
            state.request_index,
            lambda: original(processor, output, *rest),
            time.time_ns(),
            contextvars.copy_context(),
        )
    )
    return None


def instrument_manual(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """In place of the function by which it does."""
    more = _MORE.get()
    if more is not None:
        attributes, end = more
        named["attributes"] = {**(named.get("attributes") or {}), **attributes}
        named["end_time"] = end
    return original(*args, **named)


def attributes_of(receipt: Receipt) -> dict[str, Any]:
    """What a span says of a completion."""
    found: dict[str, Any] = {
        "midstream.receipt.status": receipt.status,
        "midstream.captured.rows": sum(one.actual for one in receipt.captured),
        "midstream.captured.dropped": receipt.dropped,
        "midstream.probes.scores": sum(one.actual for one in receipt.probed),
    }
    if receipt.edited is not None:
        found["midstream.edits.applied"] = receipt.edited.applied
        found["midstream.edits.cached"] = receipt.edited.cached
        found["midstream.edits.tokens"] = receipt.edited.tokens
    if receipt.kept:
        found["midstream.sinks"] = [f"{sink}: {kept.status}" for sink, kept in receipt.kept]
    return found
