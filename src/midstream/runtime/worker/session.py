"""One worker's midstream: what every step goes through, whatever the model runner."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.codecs import Codec, Raw, parse_codec
from midstream.ops import layout
from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.segments import PlanSegment, RankShare, cut
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.request_state import (
    RequestState,
    acquire_segments,
    idle_segment,
    release_segments,
)
from midstream.runtime.worker.row_index import ArenaRows, CapturedRowIndex, RowBlock, Scores
from midstream.runtime.worker.step.in_flight import (
    InFlightStep,
    PreparedStep,
    bounds,
    positions_of,
    shifted,
)
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import CodecBatch, StepPlan
from midstream.runtime.worker.step.step_planner import Planner
from midstream.runtime.worker.step_counts import StepCounts
from midstream.runtime.worker.tables.device_buffers import Buffers, upload
from midstream.runtime.worker.tables.program_table import ProgramTable
from midstream.runtime.worker.taps.tap_check import TapSignature
from midstream.sites import Tap
from midstream.spec import ResolvedPlan
from midstream.spec.resolve.wire import from_bytes
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Copy, Parcel, Shipment, Transport

_CACHED_PLANS = 256
_LOGGER = logging.getLogger(__name__)
# Of a request whose plan cannot be read.
_NOTHING = ResolvedPlan(0, (), ())
Span = tuple[int, int]
Stops = Mapping[str, Mapping[str, int]]


class WorkerSession:
    """Arms the buffers before a step, disarms them after it, and keeps what came out.

    Everything on the device is queued on the current stream, so "before" and "after" hold there
    even though the host runs ahead.
    """

    def __init__(
        self,
        buffers: Buffers,
        taps: dict[Tap, int],
        transport: Transport,
        arena: Arena,
        max_model_len: int,
        share: RankShare,
        trace: RankChecksum | None = None,
    ) -> None:
        """Args:
        buffers: the rank's.
        taps: the rank's taps and their indices.
        transport: owner of `buffers.ring`.
        arena: where it brings the rows.
        max_model_len: most positions that a request can have.
        share: which part of the vectors leaves through this rank.
        trace: keeps checksums; None: nobody asks for them.
        """
        self._buffers = buffers
        self._taps = taps
        self._transport = transport
        self._arena = arena
        self._share = share
        self._trace = trace
        self._tables = ProgramTable(buffers)
        self._planner = Planner(self._tables, max_model_len)
        self._codecs: dict[str, int] = {Raw().spec: 0}
        self._by_codec: list[Codec] = [Raw()]
        self._ledger: CapturedRowIndex[ArenaRows] = CapturedRowIndex()
        # Scores are kept like captured rows: a record is one row, as wide as there are slots.
        self._scores: CapturedRowIndex[Scores] = CapturedRowIndex()
        self._score_kind = self._scores.kind((0,))
        self._armed = _NO_TOKENS
        self._admitted = 0
        self._firing = TapSignature(taps)
        self.counts = StepCounts()
        self._in_flight: deque[InFlightStep] = deque()
        self._current: PreparedStep | None = None
        self._leaving: list[tuple[int, RequestState]] = []
        self._left: dict[str, list[RequestState]] = {}
        self._checked = False
        self._failures: dict[str, Failure] = {}
        # Many requests share a plan, to the byte.
        self._parse = functools.lru_cache(maxsize=_CACHED_PLANS)(self._parse_and_cut)

    # -- requests come and go ---------------------------------------------------------------

    def add(self, request_id: str, uid: str, plan: bytes, computed: int = 0) -> None:
        """A request that asks for something is about to run, or runs again after preemption.

        What goes wrong here is that request's own failure: the engine core is told to end it, and
        its receipt says why.

        Args:
            request_id: vLLM's.
            uid: midstream's own.
            plan: what it asks for, packed.
            computed: how many of its tokens need not be computed.
        """
        if self._trace is not None:
            self._trace.asked(request_id, uid, plan, computed)
        known = self._planner.get(request_id)
        if known is not None:
            if known.uid == uid:
                return
            # An id that is used again while its first bearer is still being settled.
            self._settle_until(self._last_step_of([known]))
        problem = ""
        resolved, segments = _NOTHING, [idle_segment()]
        try:
            resolved, pieces = self._parse(plan)
            codec = self._codec(resolved.codec)
            segments = acquire_segments(pieces, self._tables, self._ledger, codec)
        except Exception as error:  # whatever it is, it is this request's alone
            problem = f"{type(error).__name__}: {error}"
            _LOGGER.exception("midstream failed request %s", request_id)
            self._failures[request_id] = Failure(computed, problem)
        self._admitted += 1
        request = RequestState(
            id=request_id,
            uid=uid,
            plan=resolved,
            slot=self._planner.new_slot(),
            segments=segments,
            serial=self._admitted,
            problem=problem,
            oldest=self._ledger.noted,
        )
        self._planner.add(request)

    def grow(self, request_id: str, uid: str, prompt: Sequence[int] | None) -> None:
        """A request comes once more: its prompt has grown by another input, or it was preempted.

        Args:
            request_id: vLLM's.
            uid: midstream's own.
            prompt: the token ids of its prompt as it is now; None: it is of embeddings.
        """
        known = self._planner.get(request_id)
        if known is not None and known.uid == uid:
            known.prompt = list(prompt or ())
            known.turns.append(len(known.prompt))

    def finish(self, request_id: str) -> None:
        """A request runs no more. Unknown ids are those that asked for nothing."""
        request = self._planner.get(request_id)
        if request is None or any(request is leaving for _, leaving in self._leaving):
            return
        release_segments(request.segments, self._tables)
        self._failures.pop(request_id, None)
        self._planner.retire(request)
        self._leaving.append((self._last_step_of([request]), request))
        self._let_go()

    @contextmanager
    def taking(self, uids: list[str]) -> Iterator[dict[str, list[RequestState]]]:
        """The requests of those uids, finished or not, with their rows; they are forgotten here.

        Waits for the steps that they were in, and for no later one: the device does not run dry
        meanwhile. What nobody has a use for afterwards is free again.
        """
        wanted = set(uids)
        mine = [request for request in self._planner.all() if request.uid in wanted]
        self._settle_until(self._last_step_of(mine))
        for request in mine:
            self.finish(request.id)
        taken = {uid: self._left.pop(uid, []) for uid in uids}
        requests = [request for found in taken.values() for request in found]
        serials = [request.serial for request in requests]
        blocks, scores = self._ledger.take(serials), self._scores.take(serials)
        for request in requests:
            # Of a position that was computed again after its row was handed over, that one stands.
            request.blocks = _since(request.handed, blocks[request.serial])
            request.scores = scores[request.serial]
        try:
            yield taken
        finally:
            self._ledger.free_spent()
            self._scores.free_spent()

    @contextmanager
    def handing_over(self, stops: Stops) -> Iterator[dict[str, list[RequestState]]]:
        """Rows of requests that go on, each once, which are forgotten here: per uid, copies of its
        requests that have nothing but these. What nobody has a use for afterwards is free again.

        Args:
            stops: per uid and id, the position up to which rows are wanted; no token before it may
                be a draft. Those whose forward has been queued are handed over. Who reads them
                waits until they are there, and for nothing else.
        """
        self._settle()
        left = [request for uid in stops for request in self._left.get(uid, ())]
        mine = [
            request
            for request in (*left, *self._planner.all())
            if request.id in stops.get(request.uid, ())
        ]
        until = {request.serial: stops[request.uid][request.id] for request in mine}
        oldest = min((request.oldest for request in mine), default=self._ledger.noted)
        blocks, oldest = self._ledger.take_until(until, oldest)
        found: dict[str, list[RequestState]] = {uid: [] for uid in stops}
        nothing = np.zeros(0, np.uint16)
        for request in mine:
            rows = _since(request.handed, blocks[request.serial])
            request.oldest = oldest
            request.handed = max(
                (request.handed, *(int(block.positions[-1]) + 1 for block in rows))
            )
            found[request.uid].append(replace(request, blocks=rows, scores=[], done=nothing))
        try:
            yield found
        finally:
            self._ledger.free_spent()

    def codec(self, number: int) -> Codec:
        """What a block's `codec` stands for."""
        return self._by_codec[number]

    def peek(self, spans: Mapping[str, Span]) -> dict[str, tuple[RequestState, RowBlock[Scores]]]:
        """Scores of requests that go on, by uid; nothing is forgotten.

        Args:
            spans: per uid, [start, stop) of positions whose forward has been queued. Waits until
                their scores are there, and for nothing else.
        """
        self._settle()
        left = [request for uid in spans for request in self._left.get(uid, ())]
        requests = {
            request.serial: request
            for request in (*left, *self._planner.all())
            if request.uid in spans
        }
        wanted = {serial: spans[request.uid] for serial, request in requests.items()}
        count = sum(request.num_scored(*wanted[serial]) for serial, request in requests.items())
        found = self._scores.look((0,), wanted, count)
        return {requests[serial].uid: (requests[serial], block) for serial, block in found.items()}

    @property
    def failures(self) -> dict[str, Failure]:
        """What went wrong for requests that run and was not told yet, by vLLM's ids."""
        return dict(self._failures)

    def forget_failures(self) -> None:
        """They were told."""
        self._failures.clear()

    # -- steps ------------------------------------------------------------------------------

    def before_forward(self, view: StepBatch) -> None:
        """Arms the buffers for the step that is queued next."""
        began = time.perf_counter_ns()
        plan = self._planner.plan(view, watch=not self._checked)
        self.counts.steps += 1
        self.counts.planner_ns += time.perf_counter_ns() - began
        if self._trace is not None:
            self._trace.step(view, plan, self._tables)
        if plan is None:
            self._disarm()
            return
        self.counts.take(plan.num_records)
        first = self._transport.reserve(plan.num_records)
        self._buffers.tally[: plan.tokens.shape[0]].zero_()
        self._arm(shifted(plan.tokens, first))
        if plan.by_id:
            ids = view.token_ids()
            self._buffers.ids[: ids.shape[0]].copy_(ids)
        self._current = PreparedStep(plan, first, self._await_positions(plan, view))

    def after_forward(self) -> None:
        """Sends captured rows on their way, and takes in what has arrived.

        Raises:
            TapError: in the first step of the engine, a tap did not fire.
        """
        if self._current is None:
            return
        current, self._current = self._current, None
        plan, first = current.plan, current.first
        rows = plan.tokens.shape[0]
        scored = rows if plan.scored else 0
        shipment = self._transport.ship(
            [
                Parcel(first + load.first, load.num_rows, self._by_codec[load.codec])
                for load in plan.loads
            ],
            self._buffers.tally[:rows],
            self._buffers.scores[:scored],
        )
        if plan.num_records:
            # Whatever runs before the next step must not write where rows are on their way.
            self._disarm()
        self._in_flight.append(InFlightStep(self.counts.steps, current, shipment))
        for load, extent in zip(plan.loads, shipment.extents, strict=True):
            self._keep_rows(current, load, extent, shipment)
        if plan.scored:
            self._keep_scores(current, shipment)
        if not self._checked:
            self._check_first(plan, shipment)
        self._settle()

    # -- inside -----------------------------------------------------------------------------

    def _arm(self, tokens: NDArray[np.int32]) -> None:
        """Says what the rows of the next forward ask for. From one decode step to the next that
        is often the same, and then nothing is sent: edits stay armed until they change.
        """
        rows, before = tokens.shape[0], self._armed.shape[0]
        if tokens is self._armed or rows == before and np.array_equal(tokens, self._armed):
            return
        upload(self._buffers.tokens[:rows], torch.from_numpy(tokens))
        if before > rows:
            self._buffers.tokens[rows:before].zero_()
        self._armed = tokens

    def _disarm(self) -> None:
        if self._armed.shape[0]:
            self._buffers.tokens[: self._armed.shape[0]].zero_()
            self._armed = _NO_TOKENS

    def _parse_and_cut(self, plan: bytes) -> tuple[ResolvedPlan, list[PlanSegment]]:
        resolved = from_bytes(plan)
        return resolved, cut(resolved, self._taps, self._share)

    def _await_positions(self, plan: StepPlan, view: StepBatch) -> Copy | None:
        """Has the device say where the rows are, if the host does not know."""
        if plan.pieces.exact or view.late is None:
            return None
        positions = view.late.positions()
        if plan.told:
            column = self._buffers.tokens[: positions.shape[0], layout.POSITION]
            column.copy_(positions)
        return self._transport.copy(positions)

    def _codec(self, spec: str) -> int:
        """The number of a codec."""
        number = self._codecs.get(spec)
        if number is None:
            codec = parse_codec(spec)
            # What it needs on the device is made here, and not on the way of a step's rows.
            codec.encode(self._buffers.ring[:0])
            self._by_codec.append(codec)
            number = self._codecs[spec] = len(self._by_codec) - 1
        return number

    def _keep_rows(
        self, armed: PreparedStep, load: CodecBatch, extent: Extent | None, shipment: Shipment
    ) -> None:
        pieces = armed.plan.pieces
        if extent is None:
            lost = pieces.length[load.mine] * pieces.width[load.mine]
            for slot, count in zip(pieces.slot[load.mine].tolist(), lost.tolist(), strict=True):
                request = self._planner.by_slot(slot)
                assert request is not None
                request.dropped += count
            return
        ring, codec = self._buffers.ring, self._by_codec[load.codec]
        self._ledger.note(
            ArenaRows(shipment, extent, codec.row_bytes(ring.shape[1], ring.dtype), self._arena),
            load.serial,
            positions_of(armed, load.mine),
            load.length,
            load.record,
            load.kind,
        )

    def _keep_scores(self, armed: PreparedStep, shipment: Shipment) -> None:
        pieces = armed.plan.pieces
        mine = pieces.scored > 0
        self._scores.note(
            Scores(shipment),
            self._planner.serials(pieces.slot[mine]),
            positions_of(armed, mine),
            pieces.length[mine],
            pieces.row[mine],
            np.full(int(mine.sum()), self._score_kind),
        )

    def _settle(self) -> None:
        """Takes in the steps whose results have arrived."""
        while self._in_flight and self._in_flight[0].shipment.ready():
            self._verify(self._in_flight.popleft())
        self._let_go()

    def _settle_until(self, number: int) -> None:
        """Takes in the steps up to this one, for which it waits, and others that have arrived."""
        while self._in_flight and self._in_flight[0].number <= number:
            self._verify(self._in_flight.popleft())
        self._settle()

    def _last_step_of(self, requests: Sequence[RequestState]) -> int:
        """The latest step under way in which any of these asked for something; 0: there is none."""
        slots = [request.slot for request in requests]
        for step in reversed(self._in_flight):
            if np.isin(step.armed.plan.pieces.slot, slots).any():
                return step.number
        return 0

    def _let_go(self) -> None:
        """Forgets finished requests once every step that they were in has been verified."""
        oldest = self._in_flight[0].number if self._in_flight else self.counts.steps + 1
        leaving, self._leaving = self._leaving, []
        for number, request in leaving:
            if number < oldest:
                self._planner.forget(request)
                self._left.setdefault(request.uid, []).append(request)
            else:
                self._leaving.append((number, request))

    def _verify(self, step: InFlightStep) -> None:
        """Holds what the device did against what it was to do, token by token."""
        plan = step.armed.plan
        if step.armed.positions is not None:
            positions = step.armed.positions.values().numpy()[plan.active]
            plan = replace(plan, positions=positions.astype(np.int64))
        tally = step.shipment.tally().numpy()[plan.active]
        edits = tally[:, layout.EDITS].astype(np.int64)
        self._planner.record(plan, edits)
        wrong = (
            (tally[:, layout.SIGNATURE] != self._firing.signature)
            | (edits < plan.fewest)
            | (edits > plan.most)
            | (tally[:, layout.CAPTURES] != plan.captures)
        )
        for nth in np.flatnonzero(wrong & (plan.slots >= 0)).tolist():
            request = self._planner.by_slot(int(plan.slots[nth]))
            if request is None or request.problem:
                continue
            request.problem = (
                f"position {plan.positions[nth]}: asked for {bounds(plan, nth)} edits and "
                f"{plan.captures[nth]} vectors, the device did {edits[nth]} and "
                f"{tally[nth, layout.CAPTURES]}; {self._firing.diagnose(int(tally[nth, 0]))}"
            )
            if self._planner.runs(request):
                position = int(plan.positions[nth])
                self._failures[request.id] = Failure(position, request.problem)

    def _check_first(self, plan: StepPlan, shipment: Shipment) -> None:
        self._checked = True
        tally = shipment.tally().numpy()[plan.active]
        self._firing.check(tally[:, layout.SIGNATURE])

    def check_integrity(self) -> None:
        """Invariants between steps; cheap."""
        assert self._current is None
        self._tables.check_integrity()
        armed = self._armed.shape[0]
        held = self._buffers.tokens[:armed].cpu().numpy().copy()
        if (self._armed[:, layout.POSITION] < 0).any():  # which the device filled in
            held[:, layout.POSITION] = self._armed[:, layout.POSITION]
        assert np.array_equal(held, self._armed)
        assert not bool(self._buffers.tokens[armed:].any())
        if not len(self._planner) and not self._left:
            assert not len(self._ledger)
            assert not len(self._scores)


_NO_TOKENS = np.zeros((0, layout.TOKEN_COLUMNS), np.int32)


def _since(position: int, blocks: list[RowBlock[ArenaRows]]) -> list[RowBlock[ArenaRows]]:
    """What of some blocks is at that position and behind it."""
    found = [block.since(position) for block in blocks]
    return [block for block in found if block.positions.size]
