"""Brings captured rows to the sinks, and puts what became of them on the outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.receipt import CaptureResult, Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.sink_routes import Route
from midstream.runtime.frontend.results.assembly import ATTRIBUTES, tokens_of
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.protocol.results import ResultBlock
from midstream.runtime.protocol.runs import expand
from midstream.sinks import Delivery
from midstream.sinks.sink_set import SinkSet
from midstream.sites import Tap
from midstream.spec import ResolvedPlan
from midstream.spec.sink_target import MEMORY

Vectors = tuple[int, torch.dtype]

# All that midstream puts on an output.
RESULTS = (*ATTRIBUTES, "capture_results", "activation_manifest")
# What becomes of rows that are on the output.
_THERE: Future[CaptureResult] = Future()
_THERE.set_result(CaptureResult())
# The sink whose manifest is also that of the output.
_MANIFEST_SINK = "npz"


@dataclass(frozen=True, slots=True)
class SinkShare:
    """What one sink gets of one completion.

    Attributes:
        completion: vLLM's CompletionOutput.
        route: whose these rows are.
        delivery: None for `memory`, which has them on the output.
        size: about how many bytes the rows take, as they came.
        before: what becomes of the pieces that the sink was given before.
    """

    completion: Any
    route: Route
    delivery: Delivery | None
    size: int = 0
    before: tuple[Future[CaptureResult], ...] = ()


class PendingDelivery:
    """One output on its way to sinks."""

    def __init__(
        self, output: Any, asked: AdmittedRequest, told: Sequence[tuple[SinkShare, Any]]
    ) -> None:
        """Args:
        output: vLLM's RequestOutput.
        asked: what was asked for.
        told: each share and the future of its result.
        """
        self.output = output
        self._asked = asked
        self._told = told

    @property
    def waits(self) -> bool:
        """Whether a sink has not told yet what became of its share."""
        return not all(one.done() for share, last in self._told for one in (*share.before, last))

    def settle(self) -> None:
        """Waits for the sinks, and puts on the output what became of its rows."""
        results = [
            (share, _of_all([*(one.result() for one in share.before), last.result()]))
            for share, last in self._told
        ]
        put_results(self.output, self._asked, results)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request whose rows have been fetched.

    Attributes:
        asked: what was asked for.
        output: vLLM's RequestOutput, assembled; its `activations` are those for `memory` when they
            have been handed to the sinks.
        vectors: width and dtype of those that were captured.
        pieces: what came before the end; None: nothing was to.
        blocks: per completion, what came at the end.
    """

    asked: AdmittedRequest
    output: Any
    vectors: Vectors
    pieces: PartialRows | None = None
    blocks: Mapping[int, Sequence[ResultBlock]] = field(default_factory=dict)

    def end(self, share: SinkShare) -> None:
        """A sink has been handed the last that it gets of a completion."""
        if self.pieces is not None:
            self.pieces.end(share.route, share.completion.index)


def send(sinks: SinkSet, finished: FinishedRequest) -> PendingDelivery:
    """Hands an output's rows to its sinks. Waits while one of them has no room."""
    told: list[tuple[SinkShare, Future[CaptureResult]]] = []
    for share in shares_of(finished):
        if share.delivery is None:
            told.append((share, _THERE))
        else:
            queue = sinks.queue(share.route.sink)
            told.append((share, queue.put(share.delivery, share.size)))
            finished.end(share)
    return PendingDelivery(finished.output, finished.asked, told)


async def send_soon(sinks: SinkSet, finished: FinishedRequest) -> None:
    """As `send`, for an event loop; waits for the results and puts them on the output."""

    async def bring(share: SinkShare) -> CaptureResult:
        if share.delivery is None:
            return CaptureResult()
        last = await sinks.queue(share.route.sink).put_soon(share.delivery, share.size)
        finished.end(share)
        told = [await asyncio.wrap_future(one) for one in (*share.before, last)]
        return _of_all(told)

    shares = shares_of(finished)
    results = await asyncio.gather(*(bring(share) for share in shares))
    put_results(finished.output, finished.asked, list(zip(shares, results, strict=True)))


def shares_of(finished: FinishedRequest) -> list[SinkShare]:
    """What each sink gets. What is not for `memory` leaves the output."""
    asked, output, vectors = finished.asked, finished.output, finished.vectors
    pieces = finished.pieces
    shares: list[SinkShare] = []
    for completion in output.outputs:
        whole, index = completion.activations, completion.index
        completion.activations = None
        tokens = tokens_of(output, completion, asked.plan)
        for route in asked.routes:
            if pieces is not None and route in pieces.routes:
                rows = pieces.rest(route, index, finished.blocks[index], tokens)
                before = pieces.told(route, index)
                delivery = _delivery(asked, output, completion, route, rows)
                delivery = replace(delivery, piece=len(before))
                shares.append(SinkShare(completion, route, delivery, pieces.size_of(rows), before))
                continue
            rows = whole if route.is_all else _only(whole, asked, route, tokens, vectors)
            if route.sink == MEMORY:
                completion.activations = rows
                shares.append(SinkShare(completion, route, None))
                continue
            width = rows.codec.row_bytes(*vectors)
            size = width * sum(rows.counts().values())
            delivery = _delivery(asked, output, completion, route, rows)
            shares.append(SinkShare(completion, route, delivery, size))
    return shares


def put_results(
    output: Any, asked: AdmittedRequest, told: Sequence[tuple[SinkShare, CaptureResult]]
) -> None:
    """Sets `capture_results` and `activation_manifest` on the completions and, put together, on
    the output; what went wrong is in the receipts.

    Args:
        output: vLLM's RequestOutput.
        asked: what was asked for.
        told: what each sink said of its share.
    """
    every: dict[str, list[CaptureResult]] = {}
    for completion in output.outputs:
        found: dict[str, list[CaptureResult]] = {}
        problems = []
        for share, result in told:
            if share.completion is not completion:
                continue
            sink = share.route.sink
            if result.status != "ok":
                problems.append(f"sink {sink}: {result.reason or result.status}")
            result = _as_far_as_came(result, asked.plan, share.route, completion.receipt)
            found.setdefault(sink, []).append(result)
        joined = {sink: CaptureResult.joined(results) for sink, results in found.items()}
        completion.capture_results = joined or None
        completion.activation_manifest = _manifest(joined)
        kept = tuple((sink, one) for sink, one in joined.items() if sink != MEMORY)
        if kept:
            receipt = completion.receipt
            completion.receipt = replace(
                receipt, kept=kept, problems=(*receipt.problems, *problems)
            )
        for sink, one in joined.items():
            every.setdefault(sink, []).append(one)
    output.capture_results = {
        sink: CaptureResult.joined(results) for sink, results in every.items()
    } or None
    output.activation_manifest = None
    if len(output.outputs) == 1:
        (only,) = output.outputs
        output.activations, output.receipt = only.activations, only.receipt
        output.activation_manifest = only.activation_manifest
        extras = getattr(getattr(output, "metrics", None), "extras", None)
        if isinstance(extras, dict) and only.activation_manifest is not None:
            extras["activation_manifest"] = only.activation_manifest


def _only(
    rows: Activations, asked: AdmittedRequest, route: Route, tokens: list[int], vectors: Vectors
) -> Activations:
    """Those of the rows that a route's captures asked for."""
    plan = replace(asked.plan, captures=tuple(asked.plan.captures[nth] for nth in route.captures))
    values: dict[Tap, Rows] = {}
    positions: dict[Tap, torch.Tensor] = {}
    for captures, taps in plan.alike:
        wanted = expand(plan.ranges_of(captures, len(tokens), tokens))
        for tap in taps:
            there = rows.positions_of(*tap)
            chosen = torch.from_numpy(np.flatnonzero(np.isin(there.numpy(), wanted)))
            encoded = rows.encoded(*tap)[:, None]
            values[tap] = Rows(rows.codec, *vectors, (encoded,), (0,), chosen)
            positions[tap] = there[chosen]
    return Activations(
        {tap: values[tap] for tap in plan.taps},
        {tap: positions[tap] for tap in plan.taps},
        tokens,
    )


def _delivery(
    asked: AdmittedRequest, output: Any, completion: Any, route: Route, rows: Activations
) -> Delivery:
    ids = output.prompt_token_ids
    receipt: Receipt = completion.receipt
    return Delivery(
        name=route.name,
        tag=route.tag,
        metadata=route.metadata,
        request_id=output.request_id,
        completion=completion.index,
        completions=len(output.outputs),
        prompt=output.prompt,
        prompt_token_ids=None if ids is None else tuple(ids),
        prompt_tokens=receipt.prompt_tokens,
        text=completion.text,
        generated_token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        plan=asked.own,
        receipt=receipt,
        activations=rows,
    )


def _of_all(results: Sequence[CaptureResult]) -> CaptureResult:
    """What became of a share: of its pieces, and of the last."""
    return results[0] if len(results) == 1 else CaptureResult.of_pieces(results)


def _as_far_as_came(
    result: CaptureResult, plan: ResolvedPlan, route: Route, receipt: Receipt
) -> CaptureResult:
    """A sink's result, which is no better than what it was given."""
    taps = {tap for nth in route.captures for tap in plan.captures[nth].taps}
    counts = [one for one in receipt.captured if (one.site, one.layer) in taps]
    expected, actual = (sum(one.expected for one in counts), sum(one.actual for one in counts))
    if result.status != "ok" or actual == expected:
        return result
    return replace(result, status="partial", reason=f"{actual} of {expected} rows came")


def _manifest(results: dict[str, CaptureResult]) -> Any:
    found = results.get(_MANIFEST_SINK)
    return None if found is None else found.manifest
