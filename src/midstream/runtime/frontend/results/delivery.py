"""Delivery of captured rows to sinks at a request's end, and results on its output."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from midstream.plan import ModelShape, ResolvedPlan
from midstream.plan.readouts.capture import GATHERED, SHARDED
from midstream.plan.sink_target import MEMORY
from midstream.results.activations import Activations, with_heads
from midstream.results.encoded_rows import Rows
from midstream.results.readouts import RESULTS as READOUTS
from midstream.results.receipt import CaptureResult, Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.budget import row_sizes
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.results.assembly import (
    CompletionResults,
    assemble,
    no_rows,
    select_final,
)
from midstream.runtime.frontend.results.outputs import with_results
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.readouts import parted
from midstream.runtime.protocol.results import ResultBlock, WorkerAnswers
from midstream.sinks.delivery import (
    DeliveredRows,
    DeliverySource,
    Puts,
    Queues,
    SinkPut,
    run_puts,
    run_puts_soon,
)
from midstream.sites import Tap

# All attributes that midstream sets on an output and its completions.
RESULTS = (
    "activations",
    *READOUTS,
    "probes",
    "receipt",
    "capture_results",
    "activation_manifest",
)
_NO_RESULTS = dict.fromkeys(RESULTS)
# Result of rows that are on the output.
_STORED = CaptureResult()
_DONE: Future[CaptureResult] = Future()
_DONE.set_result(_STORED)
# The manifest of this sink is also set on the output.
_MANIFEST_SINK = "npz"


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request whose results were fetched. `partial_rows`: those delivered before the end."""

    admitted: AdmittedRequest
    output: Any
    shape: ModelShape
    results: Mapping[int, CompletionResults]
    partial_rows: PartialRows | None = None

    @staticmethod
    def of(
        admitted: AdmittedRequest,
        output: Any,
        shape: ModelShape,
        answers: WorkerAnswers,
        partial_rows: PartialRows | None,
    ) -> FinishedRequest:
        before = {} if partial_rows is None else partial_rows.received()
        results = assemble(output, admitted, answers, shape, before)
        return FinishedRequest(admitted, output, shape, results, partial_rows)


@dataclass(frozen=True, slots=True)
class SinkShare:
    """The rows of one completion for one sink."""

    completion: int  # index
    route: SinkRoute
    put: SinkPut | None  # their delivery; None: the rows are for `memory`
    rows: Activations | None = None  # for `memory`
    earlier: tuple[Future[CaptureResult], ...] = ()


@dataclass(frozen=True, slots=True)
class PendingDelivery:
    """A finished request whose rows are in the queues of their sinks."""

    _finished: FinishedRequest
    _shares: Sequence[tuple[SinkShare, Sequence[Future[CaptureResult]]]]

    @property
    def futures(self) -> list[Future[CaptureResult]]:
        return [future for _, futures in self._shares for future in futures]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def set_results(self, output: Any) -> None:
        """Set all results on an output, which may have its last tokens alone. Blocks until then."""
        results = [
            (share, _joined([future.result() for future in futures]))
            for share, futures in self._shares
        ]
        _set_results(output, self._finished, results)


def set_nothing(output: Any) -> None:
    """Set midstream's attributes on an output that has no results, or none yet."""
    # Those of pooling requests are not listed.
    completions = output.outputs if isinstance(output.outputs, list) else ()
    for holder in (output, *completions):
        holder.__dict__.update(_NO_RESULTS)


def deliver(sinks: Queues, finished: FinishedRequest) -> PendingDelivery:
    """Put a request's rows into the queues of their sinks. Blocks while a queue is full."""
    shares = shares_of(finished)
    return PendingDelivery(
        finished, [(share, run_puts(_puts(finished, share), sinks)) for share in shares]
    )


async def deliver_soon(sinks: Queues, finished: FinishedRequest) -> PendingDelivery:
    """As `deliver`, and wait for the results. A sink whose queue is full does not delay others."""

    async def put(share: SinkShare) -> Sequence[Future[CaptureResult]]:
        futures = await run_puts_soon(_puts(finished, share), sinks)
        for future in futures:
            await asyncio.wrap_future(future)
        return futures

    shares = shares_of(finished)
    if all(share.put is None for share in shares):
        return PendingDelivery(finished, [(share, (_DONE,)) for share in shares])
    futures = await asyncio.gather(*(put(share) for share in shares))
    return PendingDelivery(finished, list(zip(shares, futures, strict=True)))


def set_on_output(output: Any, finished: FinishedRequest) -> bool:
    """Set the results on an output of one completion that gets all vectors; else return False."""
    admitted, routes = finished.admitted, finished.admitted.routes
    if len(output.outputs) > 1 or admitted.plan.pattern_widths:
        return False
    (only,) = output.outputs
    mine = finished.results[only.index]
    shown = None
    if routes:
        route, receipt = routes[0], mine.receipt
        if len(routes) > 1 or route.sink != MEMORY or not route.is_all:
            return False
        if finished.partial_rows is not None or receipt.dropped or receipt.problems:
            return False
        assert mine.activations is not None, "there is a route only for captured rows"
        heads = admitted.heads(route.captures, finished.shape)
        shown = with_heads(mine.activations, heads, admitted.media)
    attributes = {
        **_NO_RESULTS,
        "activations": shown,
        "probes": mine.probes,
        "receipt": mine.receipt,
        "capture_results": {MEMORY: _STORED} if routes else None,
    }
    only.__dict__.update(attributes)
    output.__dict__.update(attributes)
    with_results(output, several=False)
    return True


def _puts(finished: FinishedRequest, share: SinkShare) -> Puts[Sequence[Future[CaptureResult]]]:
    """Put one share; return the results of all its pieces."""
    if share.put is None:
        return (_DONE,)
    last = yield share.put
    if finished.partial_rows is not None:
        finished.partial_rows.end(share.route, share.completion)
    return (*share.earlier, last)


def shares_of(finished: FinishedRequest) -> list[SinkShare]:
    admitted, output, shape = finished.admitted, finished.output, finished.shape
    sizes = row_sizes(admitted.plan, shape) if admitted.routes else {}
    partial = finished.partial_rows
    shares: list[SinkShare] = []
    for completion in output.outputs:
        index = completion.index
        mine = finished.results[index]
        for route in admitted.routes:
            earlier: tuple[Future[CaptureResult], ...] = ()
            if partial is not None and route in partial.routes:
                rows, size = partial.last_rows(route, index, mine.blocks, mine.tokens)
                earlier = partial.results(route, index)
            else:
                assert mine.activations is not None, "there is a route only for captured rows"
                rows = mine.activations
                if not route.is_all:
                    chosen = admitted.plan.only(route.captures)
                    rows = _rows_of(rows, chosen, mine.tokens, shape)
                if route.sink == MEMORY:
                    heads = admitted.heads(route.captures, shape)
                    of_heads = with_heads(rows, heads, admitted.media)
                    shares.append(SinkShare(index, route, None, of_heads))
                    continue
                size = sum(sizes[tap] * count for tap, count in rows.counts().items())
            shown = parted(with_heads(rows, {}, admitted.media), admitted)
            nothing = Activations({}, {}, mine.tokens, positions_of_media=admitted.media)
            delivery = _source(output, completion).delivery(
                route.label,
                admitted.own,
                mine.receipt,
                DeliveredRows(
                    shown.activations or nothing,
                    {key: made for key, made in shown.readouts.items() if made is not None},
                    piece=len(earlier),
                    return_=SHARDED if admitted.plan.sharded else GATHERED,
                    ranks=_ranks_of(mine.blocks),
                ),
            )
            put = SinkPut(route.sink, delivery, size)
            shares.append(SinkShare(index, route, put, earlier=earlier))
    return shares


def _set_results(
    output: Any, finished: FinishedRequest, results: Sequence[tuple[SinkShare, CaptureResult]]
) -> None:
    """Set the results on an output and its completions; problems of sinks go into the receipts."""
    plan = finished.admitted.plan
    every: dict[str, list[CaptureResult]] = {}
    for completion in output.outputs:
        mine = finished.results[completion.index]
        receipt = mine.receipt
        activations: Activations | None = None
        sink_results: dict[str, list[CaptureResult]] = {}
        problems = []
        for share, result in results:
            if share.completion != completion.index:
                continue
            sink = share.route.sink
            if share.put is None:
                activations = share.rows
            if result.status != "ok":
                problems.append(f"sink {sink}: {result.reason or result.status}")
            result = _limited(result, plan, share.route, receipt)
            sink_results.setdefault(sink, []).append(result)
        joined = {sink: CaptureResult.joined(results) for sink, results in sink_results.items()}
        kept = tuple((sink, sink_result) for sink, sink_result in joined.items() if sink != MEMORY)
        if kept:
            receipt = replace(receipt, kept=kept, problems=(*receipt.problems, *problems))
        shown = parted(activations, finished.admitted)
        completion.activations = shown.activations
        for name, value in shown.readouts.items():
            setattr(completion, name, value)
        completion.probes = mine.probes
        completion.receipt = receipt
        completion.capture_results = joined or None
        npz = joined.get(_MANIFEST_SINK)
        completion.activation_manifest = None if npz is None else npz.manifest
        for sink, joined_result in joined.items():
            every.setdefault(sink, []).append(joined_result)
    output.capture_results = {
        sink: CaptureResult.joined(results) for sink, results in every.items()
    } or None
    if len(output.outputs) > 1:
        with_results(output, several=True)
        output.activation_manifest = None
    else:
        (only,) = output.outputs
        output.__dict__.update({name: getattr(only, name) for name in RESULTS})
        with_results(output, several=False)
        metrics = getattr(output, "metrics", None)
        if metrics is not None and only.activation_manifest is not None:
            # vLLM's metrics have no such field; there are none with `disable_log_stats`.
            metrics.extras = {
                **(getattr(metrics, "extras", None) or {}),
                "activation_manifest": only.activation_manifest,
            }


def _ranks_of(blocks: Sequence[ResultBlock]) -> dict[Tap, tuple[int, ...]]:
    ranks_by_tap: dict[Tap, set[int]] = {}
    for block in blocks:
        if block.positions.size:
            for tap in block.taps:
                ranks_by_tap.setdefault(tap, set()).add(block.rank)
    return {tap: tuple(sorted(ranks)) for tap, ranks in ranks_by_tap.items()}


def _rows_of(
    rows: Activations, plan: ResolvedPlan, tokens: list[int], shape: ModelShape
) -> Activations:
    """Return the rows that the captures of a plan select among the rows of more captures."""
    values: dict[Tap, Rows] = {}
    positions: dict[Tap, torch.Tensor] = {}
    select, nothing = select_final(plan, tokens), no_rows(plan, shape)
    for captures, taps in plan.alike:
        selected = select(captures)
        for tap in taps:
            there = rows.positions_of(*tap)
            chosen = torch.from_numpy(np.flatnonzero(np.isin(there.numpy(), selected)))
            encoded = rows.encoded(*tap)[:, None]
            values[tap] = replace(nothing[tap], chunks=(encoded,), places=(0,), chosen=chosen)
            positions[tap] = there[chosen]
    return Activations(
        {tap: values[tap] for tap in plan.taps},
        {tap: positions[tap] for tap in plan.taps},
        tokens,
        rows.num_layers,
    )


def _source(output: Any, completion: Any) -> DeliverySource:
    ids = output.prompt_token_ids
    return DeliverySource(
        request_id=output.request_id,
        completion=completion.index,
        completions=len(output.outputs),
        prompt=output.prompt,
        prompt_token_ids=None if ids is None else tuple(ids),
        text=completion.text,
        generated_token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
    )


def _joined(results: Sequence[CaptureResult]) -> CaptureResult:
    return results[0] if len(results) == 1 else CaptureResult.of_pieces(results)


def _limited(
    result: CaptureResult, plan: ResolvedPlan, route: SinkRoute, receipt: Receipt
) -> CaptureResult:
    """Return the result of a share: at best "partial" if not all expected rows arrived."""
    if result.status != "ok" or not (receipt.dropped or receipt.problems):
        return result
    taps = {tap for index in route.captures for tap in plan.captures[index].taps}
    counts = [count for count in receipt.captured if (count.site, count.layer) in taps]
    expected = sum(count.expected for count in counts)
    actual = sum(count.actual for count in counts)
    if actual == expected:
        return result
    return replace(result, status="partial", reason=f"{actual} of {expected} rows came")
