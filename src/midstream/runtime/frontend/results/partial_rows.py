"""Rows that come while their request runs: for sinks that want them as they come, and for outputs
that show them on the way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from midstream.codecs import parse_codec
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.receipt import Captured, CaptureResult, Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.sink_routes import Route
from midstream.runtime.frontend.results.assembly import activations_of
from midstream.runtime.frontend.results.partial_scores import Selection
from midstream.runtime.frontend.results.progress import RequestProgress
from midstream.runtime.protocol.results import ResultBlock, WorkerAnswers, index_of, split
from midstream.runtime.protocol.runs import Ints, expand
from midstream.sinks import Delivery
from midstream.sinks.sink_set import SinkSet
from midstream.sites import Tap
from midstream.spec import ResolvedPlan

Wanted = Callable[[Tap], Ints]

# How often it is looked at whether a sink is to get rows.
LOOK_SECONDS = 0.05


@dataclass(slots=True)
class _Completion:
    """What has come of one completion.

    Attributes:
        before: all of it; bare where nobody gets it at the end.
        fresh: what no output has shown all of.
        shown: the position below which outputs have shown it.
        pending: what no sink was given yet.
        asked: the position below which rows were asked for.
        known: what was known of it at that time.
        counts: per route, how many rows of each tap its sink was given.
        told: per route, what becomes of each piece.
    """

    before: list[ResultBlock] = field(default_factory=list)
    fresh: list[ResultBlock] = field(default_factory=list)
    pending: list[ResultBlock] = field(default_factory=list)
    shown: int = 0
    asked: int = 0
    known: RequestProgress | None = None
    counts: dict[Route, Counter[Tap]] = field(default_factory=dict)
    told: dict[Route, list[Future[CaptureResult]]] = field(default_factory=dict)


class PartialRows:
    """One request's."""

    @staticmethod
    def of(
        asked: AdmittedRequest,
        request_id: str,
        num_completions: int,
        sinks: SinkSet,
        vectors: tuple[int, torch.dtype],
    ) -> PartialRows | None:
        """Those of a request; None where nobody is to get rows before its end. Arguments as of the
        constructor.
        """
        if not _streamed(asked) and all(sinks.pace(route.sink) is None for route in asked.routes):
            return None
        return PartialRows(asked, request_id, num_completions, sinks, vectors)

    def __init__(
        self,
        asked: AdmittedRequest,
        request_id: str,
        num_completions: int,
        sinks: SinkSet,
        vectors: tuple[int, torch.dtype],
    ) -> None:
        """Args:
        asked: what was asked for.
        request_id: as its caller knows it.
        num_completions: how many it has.
        sinks: the engine's.
        vectors: width and dtype of those that are captured.
        """
        self.ids: list[str] = []  # vLLM's, of its completions
        self.is_over = False
        self._asked = asked
        self._request_id = request_id
        self._count = num_completions
        paces = {route: sinks.pace(route.sink) for route in asked.routes}
        self._paces = {route: pace for route, pace in paces.items() if pace is not None}
        self._streamed = _streamed(asked)
        self._nothing = Rows(parse_codec(asked.plan.codec), *vectors, (), ())
        self._width = self._nothing.codec.row_bytes(*vectors)
        self._most = self._width * len(asked.plan.taps)  # bytes of a position
        self._is_kept = len(self._paces) < len(asked.routes)
        # The last row may be any until it is known that there is no other.
        self._held_back = any(one.where.last_from is not None for one in asked.plan.captures)
        self._latest = time.monotonic()
        self._completions = {nth: _Completion() for nth in range(num_completions)}
        self._selections = [
            Selection(replace(one.where, last_from=None)) for one in asked.plan.captures
        ]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Those whose sinks want rows as they come."""
        return tuple(self._paces)

    @property
    def is_streamed(self) -> bool:
        """Whether outputs show rows on the way."""
        return bool(self._streamed)

    # -- what to ask for --------------------------------------------------------------------

    def index_of(self, request_id: str) -> int:
        """Which completion vLLM's id of one is for."""
        return index_of(request_id, self._count)

    def stop(self, length: int) -> int:
        """Up to which position rows can be asked for when so many tokens are known, prompt
        included: the last of them may not have been computed on.
        """
        return max(0, length - 1 - self._held_back)

    def is_due(self, lengths: Mapping[str, int]) -> bool:
        """Whether a sink is to get rows.

        Args:
            lengths: per id, how many tokens of a running completion were generated.
        """
        prompt, waiting, nbytes = self._asked.plan.prompt_len, False, 0
        for request_id, generated in lengths.items():
            new = self.stop(prompt + generated) - self._completions[self.index_of(request_id)].asked
            waiting |= new > 0
            if generated:
                nbytes = max(nbytes, new * self._most)
        elapsed = time.monotonic() - self._latest
        return waiting and any(
            elapsed >= pace.seconds or nbytes >= pace.nbytes for pace in self._paces.values()
        )

    def ask(self, known: Mapping[str, RequestProgress]) -> dict[str, int]:
        """Up to which position rows of each of these completions are to be asked for, by id."""
        self._latest = time.monotonic()
        stops = {}
        for request_id, one in known.items():
            mine = self._completions[self.index_of(request_id)]
            stops[request_id] = self.stop(self._asked.plan.prompt_len + len(one.generated))
            # Of a prompt that is not through yet it is not known what there was.
            mine.asked = max(mine.asked, stops[request_id] if one.generated else 0)
            mine.known = one
        return stops

    # -- what has come ----------------------------------------------------------------------

    def take_in(self, answers: WorkerAnswers) -> int:
        """Takes in what the workers handed over; how many bytes of rows that are, of those that one
        rank moved where ranks share them.
        """
        nbytes = 0
        for index, parts in split(answers, self._count).items():
            mine = self._completions[index]
            for rank, block in (
                (part.worker.tensor_rank, block) for part in parts for block in part.blocks()
            ):
                if rank == 0:
                    nbytes += self._width * len(block.taps) * block.positions.size
                mine.before.append(block if self._is_kept else block.bare())
                if self._streamed:
                    mine.fresh.append(block)
                if self._paces:
                    mine.pending.append(block)
        return nbytes

    def before(self) -> dict[int, list[ResultBlock]]:
        """Per completion, all that has come."""
        return {nth: mine.before for nth, mine in self._completions.items()}

    def shown(self, tokens: Ints, is_delta: bool) -> Activations:
        """Rows for an output that goes on, of a request with one completion.

        Args:
            tokens: the ids of all tokens that are known, prompt first.
            is_delta: only those that no output has shown yet; otherwise all.
        """
        (mine,) = self._completions.values()
        start, stop = mine.shown if is_delta else 0, self.stop(len(tokens))
        blocks = [
            block
            for block in (mine.fresh if is_delta else mine.before)
            if block.positions[0] < stop
        ]
        mine.shown = stop
        mine.fresh = [block for block in mine.fresh if block.positions[-1] >= stop]
        return self._activations(self._streamed, blocks, tokens[:stop], start)

    # -- for sinks --------------------------------------------------------------------------

    def deliveries(self) -> list[tuple[Route, int, Delivery, int]]:
        """What sinks are to get now: the route, which completion, the delivery, its bytes."""
        found = []
        for index, mine in self._completions.items():
            blocks, mine.pending = mine.pending, []
            if not blocks or mine.known is None:
                continue
            tokens = self._tokens(mine.known)
            for route in self._paces:
                rows = self._activations(route.captures, blocks, tokens)
                size = self.size_of(rows)
                if size:
                    self._count_in(mine, route, rows)
                    receipt = self._receipt(mine, route, mine.known)
                    delivery = self._delivery(index, mine.known, route, rows, receipt)
                    found.append((route, index, delivery, size))
        return found

    def note(self, route: Route, index: int, told: Future[CaptureResult]) -> None:
        """A sink has been handed a piece, and tells later what became of it."""
        self._completions[index].told.setdefault(route, []).append(told)

    def end(self, route: Route, index: int) -> None:
        """A sink has been handed the last piece of a completion."""
        self._completions[index].told.pop(route, None)

    def told(self, route: Route, index: int) -> tuple[Future[CaptureResult], ...]:
        """What becomes of each piece that a sink was given of a completion."""
        return tuple(self._completions[index].told.get(route, ()))

    def rest(
        self, route: Route, index: int, blocks: Sequence[ResultBlock], tokens: list[int]
    ) -> Activations:
        """The rows of a completion's last piece.

        Args:
            route: to which sink.
            index: which completion.
            blocks: what came at its end.
            tokens: the ids of all tokens that were computed on.
        """
        plan = _only(self._asked.plan, route.captures)
        every = [*self._completions[index].pending, *blocks]

        def wanted(named: tuple[int, ...]) -> Ints:
            return expand(plan.ranges_of(named, len(tokens), tokens))

        return activations_of(plan, every, wanted, tokens, self._nothing)

    def endings(self) -> list[tuple[Route, Delivery]]:
        """The last pieces of a request that has no end of its own, for sinks that had others and
        did not get theirs.
        """
        found = []
        for index, mine in self._completions.items():
            for route in mine.told:
                assert mine.known is not None
                nothing = self._activations(route.captures, [], self._tokens(mine.known))
                receipt = replace(
                    self._receipt(mine, route, mine.known),
                    problems=("it was aborted, or its caller has left",),
                )
                delivery = self._delivery(index, mine.known, route, nothing, receipt)
                found.append((route, replace(delivery, finish_reason="abort", is_last=True)))
        return found

    def size_of(self, rows: Activations) -> int:
        """How many bytes some rows take."""
        return self._width * sum(rows.counts().values())

    # -- inside -----------------------------------------------------------------------------

    def _activations(
        self, captures: tuple[int, ...], blocks: Sequence[ResultBlock], tokens: Ints, start: int = 0
    ) -> Activations:
        """Those of some rows that captures select whatever comes, from a position on."""
        plan = _only(self._asked.plan, captures)
        start = max(start, min((int(block.positions[0]) for block in blocks), default=0))
        stop = max((int(block.positions[-1]) + 1 for block in blocks), default=0)
        stop = max(start, min(stop, len(tokens)))

        def wanted(named: tuple[int, ...]) -> Ints:
            parts = [self._selections[captures[nth]].within(start, stop, tokens) for nth in named]
            return np.unique(np.concatenate(parts))

        return activations_of(plan, blocks, wanted, torch.from_numpy(tokens), self._nothing)

    def _tokens(self, known: RequestProgress) -> Ints:
        """The ids of the tokens that have been computed on."""
        prompt = known.prompt_token_ids or (0,) * self._asked.plan.prompt_len
        return np.array((*prompt, *known.generated)[:-1], np.int64)

    def _count_in(self, mine: _Completion, route: Route, rows: Activations) -> None:
        mine.counts.setdefault(route, Counter()).update(rows.counts())

    def _receipt(self, mine: _Completion, route: Route, known: RequestProgress) -> Receipt:
        """How many rows have come."""
        counts = mine.counts[route].items()
        return Receipt(
            request_id=self._request_id,
            prompt_tokens=self._asked.plan.prompt_len,
            generated_tokens=len(known.generated),
            captured=tuple(Captured(*tap, count, count) for tap, count in counts),
            edited=None,
        )

    def _delivery(
        self, index: int, known: RequestProgress, route: Route, rows: Activations, receipt: Receipt
    ) -> Delivery:
        mine = self._completions[index]
        return Delivery(
            name=route.name,
            tag=route.tag,
            metadata=route.metadata,
            request_id=self._request_id,
            completion=index,
            completions=self._count,
            prompt=known.prompt,
            prompt_token_ids=known.prompt_token_ids,
            prompt_tokens=self._asked.plan.prompt_len,
            text="",
            generated_token_ids=known.generated,
            finish_reason=None,
            plan=self._asked.own,
            receipt=receipt,
            activations=rows,
            piece=len(mine.told.get(route, ())),
            is_last=False,
        )


def _streamed(asked: AdmittedRequest) -> tuple[int, ...]:
    """Which of a plan's captures outputs show on the way."""
    own = () if asked.own is None else asked.own.captures
    return tuple(
        nth
        for nth, capture in enumerate(asked.plan.captures)
        if capture.source >= 0 and own[capture.source].stream
    )


def _only(plan: ResolvedPlan, captures: tuple[int, ...]) -> ResolvedPlan:
    return replace(plan, captures=tuple(plan.captures[nth] for nth in captures))
