"""Rows that are delivered while their request runs, to sinks that want them so and to outputs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.plan import ModelShape, ResolvedPlan
from midstream.plan.positions.position_set import Reached
from midstream.results.activations import Activations, with_heads
from midstream.results.receipt import Captured, CaptureResult, Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.budget import row_sizes
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.results.assembly import activations_of, no_rows, select_final
from midstream.runtime.frontend.results.partial_scores import ScoreSelection
from midstream.runtime.protocol.rank_parts import joined_blocks
from midstream.runtime.protocol.results import ResultBlock, WorkerAnswers, index_of, split
from midstream.runtime.protocol.runs import Ints
from midstream.sinks import Delivery
from midstream.sinks.delivery import DeliveredRows, DeliverySource, Puts, SinkPut
from midstream.sinks.sink_set import SinkSet
from midstream.sites import Tap

# What was read of a completion's tokens for the captures of a call, by these and the capture.
Read = dict[tuple[tuple[int, ...], tuple[int, ...], int], Reached]


class RowSelection:
    """Selects rows of one plan. Has no state."""

    def __init__(self, plan: ResolvedPlan, shape: ModelShape) -> None:
        self._plan = plan
        self._no_rows = no_rows(plan, shape)
        self.row_bytes = row_sizes(plan, shape)
        self.position_bytes = sum(self.row_bytes.values())  # of all rows of one position, at most
        # A row may be the last one until the next token is known.
        self._is_last_open = any(capture.where.last_from is not None for capture in plan.captures)
        self._selections = [
            ScoreSelection(replace(capture.where, last_from=None)) for capture in plan.captures
        ]

    def stop(self, length: int) -> int:
        """Return the position below which captures are decided, while so many tokens are known."""
        return max(0, length - 1 - self._is_last_open)

    def size_of(self, rows: Activations) -> int:
        return sum(self.row_bytes[tap] * count for tap, count in rows.counts().items())

    def decided(
        self,
        captures: tuple[int, ...],
        blocks: Sequence[ResultBlock],
        tokens: Ints,
        read: Read,
        start: int = 0,
    ) -> Activations:
        """Return the rows that captures, by index, select whatever tokens follow; `read` is that
        of their completion.
        """
        plan = self._plan.only(captures)
        start = max(start, min((int(block.positions[0]) for block in blocks), default=0))
        stop = max((int(block.positions[-1]) + 1 for block in blocks), default=0)
        stop = max(start, min(stop, len(tokens)))

        def selected(chosen: tuple[int, ...]) -> Ints:
            parts = [
                self._selections[captures[index]].within(
                    start, stop, tokens, read.setdefault((captures, chosen, index), {})
                )
                for index in chosen
            ]
            return np.unique(np.concatenate(parts))

        return activations_of(plan, blocks, selected, torch.from_numpy(tokens), self._no_rows)

    def final(
        self, captures: tuple[int, ...], blocks: Sequence[ResultBlock], tokens: list[int]
    ) -> Activations:
        """Return the rows that captures, by index, select in a completion that has ended."""
        plan = self._plan.only(captures)
        return activations_of(plan, blocks, select_final(plan, tokens), tokens, self._no_rows)


class RequestProgress(NamedTuple):
    """A running completion."""

    prompt: str | None  # None: not given as text
    prompt_token_ids: tuple[int, ...] | None  # None: given as embeddings
    generated: tuple[int, ...]


def lengths_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, int]:
    """Return the number of generated tokens of each running completion, of vLLM's states by id."""
    return {
        request_id: len(states[request_id].detokenizer.output_token_ids)
        for request_id in ids
        if request_id in states
    }


def running_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, RequestProgress]:
    """Return a copy of the state of each running completion, of vLLM's states by id."""
    return {
        request_id: RequestProgress(
            state.prompt,
            None if state.prompt_token_ids is None else tuple(state.prompt_token_ids),
            tuple(state.detokenizer.output_token_ids),
        )
        for request_id in ids
        if (state := states.get(request_id)) is not None
    }


@dataclass(slots=True)
class _Completion:
    # All blocks that arrived; without their rows if nothing needs these at the end.
    received: list[ResultBlock] = field(default_factory=list)
    unshown: list[ResultBlock] = field(default_factory=list)  # not shown entirely yet
    shown: int = 0  # position below which outputs have shown rows
    undelivered: list[ResultBlock] = field(default_factory=list)  # given to no sink yet
    requested: int = 0
    read: Read = field(default_factory=dict)
    progress: RequestProgress | None = None  # when rows were last requested
    counts: dict[SinkRoute, Counter[Tap]] = field(default_factory=dict)  # that its sink got
    results: dict[SinkRoute, list[Future[CaptureResult]]] = field(default_factory=dict)  # of pieces


class PartialRows:
    """Rows of one request that are delivered before it ends."""

    @staticmethod
    def of(
        admitted: AdmittedRequest,
        request_id: str,
        num_completions: int,
        sinks: SinkSet,
        shape: ModelShape,
    ) -> PartialRows | None:
        """Create it for a request; None if nothing needs rows before its end."""
        if not admitted.plan.captures:
            return None
        paces = (sinks.pace(route.sink) for route in admitted.routes)
        if not _streamed(admitted) and all(pace is None for pace in paces):
            return None
        return PartialRows(admitted, request_id, num_completions, sinks, shape)

    def __init__(
        self,
        admitted: AdmittedRequest,
        request_id: str,
        num_completions: int,
        sinks: SinkSet,
        shape: ModelShape,
    ) -> None:
        self.ids: list[str] = []
        self.is_over = False  # no more rows are to be requested before the end
        # Held by an asynchronous engine while it fetches and delivers rows.
        self.lock = asyncio.Lock()
        self._admitted = admitted
        self._request_id = request_id
        self._count = num_completions
        paces = {route: sinks.pace(route.sink) for route in admitted.routes}
        self._paces = {route: pace for route, pace in paces.items() if pace is not None}
        self._streamed = _streamed(admitted)
        self._shown_as = admitted.heads(self._streamed, shape), admitted.media
        self._selection = RowSelection(admitted.plan, shape)
        self._needs_all_at_end = len(self._paces) < len(admitted.routes)
        self._last_request = time.monotonic()
        self._completions = {index: _Completion() for index in range(num_completions)}

    @property
    def routes(self) -> tuple[SinkRoute, ...]:
        """The routes whose sinks get rows while the request runs."""
        return tuple(self._paces)

    @property
    def is_streamed(self) -> bool:
        """Whether outputs show rows while the request runs."""
        return bool(self._streamed)

    # -- requesting rows --------------------------------------------------------------------

    def stop(self, length: int) -> int:
        """Return the position below which rows can be requested; see `RowSelection.stop`."""
        return self._selection.stop(length)

    def is_due(self, lengths: Mapping[str, int]) -> bool:
        """Return whether a sink should get rows now, given the generated tokens by id."""
        prompt, is_any_new, nbytes = self._admitted.plan.prompt_len, False, 0
        for request_id, generated in lengths.items():
            new = self.stop(prompt + generated) - self._completion(request_id).requested
            is_any_new |= new > 0
            if generated:
                nbytes = max(nbytes, new * self._selection.position_bytes)
        elapsed = time.monotonic() - self._last_request
        return is_any_new and any(
            elapsed >= pace.seconds or nbytes >= pace.nbytes for pace in self._paces.values()
        )

    def request(self, progress: Mapping[str, RequestProgress]) -> dict[str, int]:
        """Return, by vLLM's id, the position below which to fetch each completion's rows."""
        self._last_request = time.monotonic()
        stops = {}
        for request_id, request_progress in progress.items():
            mine = self._completion(request_id)
            stops[request_id] = self.stop(
                self._admitted.plan.prompt_len + len(request_progress.generated)
            )
            # While the prompt is computed, it is not known how far it is.
            mine.requested = max(
                mine.requested, stops[request_id] if request_progress.generated else 0
            )
            mine.progress = request_progress
        return stops

    # -- received rows ----------------------------------------------------------------------

    def receive(self, answers: WorkerAnswers) -> int:
        """Record rows that were fetched; return their bytes, where ranks share them the first's."""
        nbytes = 0
        for index, results in split(answers, self._count).items():
            mine = self._completions[index]
            for block in joined_blocks(results):
                if block.rank == 0:
                    nbytes += block.nbytes
                mine.received.append(block if self._needs_all_at_end else block.bare())
                if self._streamed:
                    mine.unshown.append(block)
                if self._paces:
                    mine.undelivered.append(block)
        return nbytes

    def received(self) -> dict[int, list[ResultBlock]]:
        return {index: mine.received for index, mine in self._completions.items()}

    def shown(self, tokens: Ints, is_delta: bool) -> Activations:
        """Return the rows for an output before the last; with `is_delta` those not shown yet."""
        (mine,) = self._completions.values()
        start, stop = mine.shown if is_delta else 0, self.stop(len(tokens))
        every = mine.unshown if is_delta else mine.received
        blocks = [block for block in every if block.positions[0] < stop]
        mine.shown = stop
        mine.unshown = [block for block in mine.unshown if block.positions[-1] >= stop]
        rows = self._selection.decided(self._streamed, blocks, tokens[:stop], mine.read, start)
        return with_heads(rows, *self._shown_as)

    # -- pieces for sinks -------------------------------------------------------------------

    def pieces(self) -> Puts[None]:
        """Put the received rows into the queues of their sinks, and record the results."""
        puts: list[tuple[SinkRoute, int, SinkPut]] = []
        for index, mine in self._completions.items():
            blocks, mine.undelivered = mine.undelivered, []
            if not blocks or mine.progress is None:
                continue
            tokens = self._tokens(mine.progress)
            for route in self._paces:
                rows = self._selection.decided(route.captures, blocks, tokens, mine.read)
                size = self._selection.size_of(rows)
                if size:
                    mine.counts.setdefault(route, Counter()).update(rows.counts())
                    piece = self._piece(index, mine.progress, route, rows)
                    puts.append((route, index, SinkPut(route.sink, piece, size)))
        for route, index, put in puts:
            result = yield put
            self._completions[index].results.setdefault(route, []).append(result)

    def results(self, route: SinkRoute, index: int) -> tuple[Future[CaptureResult], ...]:
        return tuple(self._completions[index].results.get(route, ()))

    def last_rows(
        self, route: SinkRoute, index: int, blocks: Sequence[ResultBlock], tokens: list[int]
    ) -> tuple[Activations, int]:
        """Return the rows of a completion's last piece, and their size in bytes."""
        every = [*self._completions[index].undelivered, *blocks]
        rows = self._selection.final(route.captures, every, tokens)
        return rows, self._selection.size_of(rows)

    def end(self, route: SinkRoute, index: int) -> None:
        """Record that a sink was given the last piece of a completion."""
        self._completions[index].results.pop(route, None)

    def endings(self) -> list[tuple[SinkRoute, Delivery]]:
        """Return last pieces, without rows, for sinks that lack theirs: the request was aborted."""
        endings = []
        for index, mine in self._completions.items():
            for route in mine.results:
                assert mine.progress is not None
                tokens = self._tokens(mine.progress)
                rows = self._selection.decided(route.captures, [], tokens, mine.read)
                piece = self._piece(index, mine.progress, route, rows)
                problems = ("it was aborted, or its caller has left",)
                receipt = replace(piece.receipt, problems=problems)
                last = replace(piece, receipt=receipt, finish_reason="abort", is_last=True)
                endings.append((route, last))
        return endings

    def _completion(self, request_id: str) -> _Completion:
        return self._completions[index_of(request_id, self._count)]

    def _tokens(self, progress: RequestProgress) -> Ints:
        prompt = progress.prompt_token_ids or (0,) * self._admitted.plan.prompt_len
        return np.array((*prompt, *progress.generated)[:-1], np.int64)

    def _piece(
        self, index: int, progress: RequestProgress, route: SinkRoute, rows: Activations
    ) -> Delivery:
        mine = self._completions[index]
        source = DeliverySource(
            request_id=self._request_id,
            completion=index,
            completions=self._count,
            prompt=progress.prompt,
            prompt_token_ids=progress.prompt_token_ids,
            text="",
            generated_token_ids=progress.generated,
            finish_reason=None,
        )
        counts = mine.counts[route].items()
        rows = with_heads(rows, {}, self._admitted.media)
        receipt = Receipt(
            request_id=self._request_id,
            prompt_tokens=self._admitted.plan.prompt_len,
            generated_tokens=len(progress.generated),
            captured=tuple(Captured(*tap, count, count) for tap, count in counts),
            edited=None,
        )
        return source.delivery(
            route.label,
            self._admitted.own,
            receipt,
            DeliveredRows(rows, piece=len(mine.results.get(route, ())), is_last=False),
        )


def _streamed(admitted: AdmittedRequest) -> tuple[int, ...]:
    """Return the indices of the captures that outputs show while the request runs."""
    own = () if admitted.own is None else admitted.own.captures
    return tuple(
        index
        for index, capture in enumerate(admitted.plan.captures)
        if capture.source >= 0 and own[capture.source].stream
    )
