"""Receipts in vLLM's tracing spans, which are made later, once the receipt exists."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from midstream.plan import ModelShape, ResolvedPlan
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.budget import row_sizes
from midstream.runtime.frontend.stats import RequestTotals
from midstream.runtime.vllm.attributes import SPANS_OF_REQUEST
from midstream.steering.guard_definition import is_probe_of_guard

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

    def finish(
        self, admitted: AdmittedRequest | None, receipt: Receipt | None, shape: ModelShape
    ) -> None:
        """Make the span, with what was asked and what the receipt of its completion says."""
        attributes = {} if admitted is None else asked_of(admitted)
        if admitted is not None and receipt is not None:
            attributes |= attributes_of(receipt, admitted.plan, shape)
        self.context.run(self._make, attributes)

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


def asked_of(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return what a request asked for, and where it and what applies to every request are."""
    own, plan = admitted.own, admitted.plan
    guards = [
        probe.name.removeprefix("guard:")
        for probe in plan.probes
        if probe.source < 0 and is_probe_of_guard(probe.name)
    ]
    taps = {tap for capture in plan.captures for tap in capture.taps}
    for parts in (plan.edits, plan.probes, plan.functions):
        taps |= {(part.site, part.layer) for part in parts}
    return {
        "midstream.asked.captures": 0 if own is None else len(own.captures),
        "midstream.asked.edits": 0 if own is None else len(own.edits),
        "midstream.asked.probes": 0 if own is None else len(own.probes),
        # Of read-outs the kind, without the name that the request gives it.
        "midstream.asked.sites": sorted({site.partition(".")[0] for site, _ in taps}),
        "midstream.asked.layers": len({layer for _, layer in taps}),
        **({"midstream.guards": guards} if guards else {}),
    }


def attributes_of(receipt: Receipt, plan: ResolvedPlan, shape: ModelShape) -> dict[str, Any]:
    """Return what a receipt says; bytes are of rows as the device encoded them."""
    totals = RequestTotals()
    totals.add([receipt], row_sizes(plan, shape), plan.reduced)
    attributes: dict[str, Any] = {
        "midstream.receipt.status": receipt.status,
        "midstream.captured.rows": sum(count.actual for count in receipt.captured),
        "midstream.captured.bytes": totals.row_bytes,
        "midstream.captured.dropped": totals.dropped,
        "midstream.probes.scores": totals.scores,
    }
    if receipt.actions:
        attributes["midstream.probes.fired"] = [
            f"{action.name}: {action.kind} at {action.position}" for action in receipt.actions
        ]
    guards = [action for action in receipt.actions if is_probe_of_guard(action.name)]
    if guards:
        attributes["midstream.guards.fired"] = [
            f"{action.name.removeprefix('guard:')}: {action.score:g} at {action.position}"
            for action in guards
        ]
    if receipt.edited is not None:
        attributes["midstream.edits.applied"] = receipt.edited.applied
        attributes["midstream.edits.cached"] = receipt.edited.cached
        attributes["midstream.edits.tokens"] = receipt.edited.tokens
    if receipt.kept:
        attributes["midstream.sinks"] = [f"{sink}: {kept.status}" for sink, kept in receipt.kept]
    return attributes
