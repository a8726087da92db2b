"""Arming of the device buffers for a step, and verification of what the device did."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.runtime.protocol.step_scores import ScoresOfStep, StepScores, scores_of_runs
from midstream.runtime.worker.gate_states import GateStates
from midstream.runtime.worker.readouts.logits import StepLogits
from midstream.runtime.worker.readouts.step_patterns import StepPatterns
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.row_index import (
    ArenaRows,
    CapturedRowIndex,
    ScoreIndex,
    known_positions,
)
from midstream.runtime.worker.split_scores import SplitScores
from midstream.runtime.worker.step import in_flight
from midstream.runtime.worker.step.armed_buffers import ArmedBuffers
from midstream.runtime.worker.step.score_cache import CachedScores, ScoreCache
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions
from midstream.runtime.worker.step.step_plan import CodecBatch, StepPlan, TokenRuns
from midstream.runtime.worker.step.sum_cache import SumCache
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.taps.tap_check import TapSignature
from midstream.sites import Tap
from midstream.transport.arena import Arena
from midstream.transport.base import Copy, Parcel, Shipment, Transport


@dataclass(slots=True)
class StepCounts:
    """Totals over the steps since the worker started; a few additions for each step."""

    steps: int = 0  # forward passes
    active: int = 0  # those in which some token had a program
    planner_ns: int = 0
    ring_last: int = 0  # units of the ring that the last active step filled; see `Buffers.units`
    ring_most: int = 0  # most units that an active step has filled


@dataclass(frozen=True, slots=True, eq=False)
class RankMemory:
    """What a row passes on its way from one of the taps (with their indices) to the arena."""

    buffers: Buffers
    taps: dict[Tap, int]
    transport: Transport
    arena: Arena
    kept: ScoreCache | None = None  # scores of cached tokens; None: there are none
    sums: SumCache | None = None  # likewise
    device_rows: DeviceRowTable | None = None  # None: no row stays on the device


class StepRecorder:
    """Owner of the armed tokens, the steps in flight, and the row index. Where the arena lacks
    room, requests are stored alone, oldest first; one without has no later rows.
    """

    def __init__(
        self,
        memory: RankMemory,
        slots: SlotTable,
        codecs: CodecTable,
        gate_states: GateStates,
        patterns: StepPatterns,
        split_scores: SplitScores | None,
    ) -> None:
        self.counts = StepCounts()
        self.rows: CapturedRowIndex[ArenaRows] = CapturedRowIndex()
        self.scores = ScoreIndex()  # one row for each token, a column for each score
        self.prepared: in_flight.PreparedStep | None = (
            None  # that is queued next; None: it has no program
        )
        self.reported: StepScores | None = None  # that leave with the last step's output
        self._buffers = memory.buffers
        self._transport = memory.transport
        self._arena = memory.arena
        self.kept = memory.kept
        self.sums = memory.sums
        self._slots = slots
        self._codecs = codecs
        self._patterns = patterns
        self._signature = TapSignature(memory.taps)
        self._armed = ArmedBuffers(memory.buffers, gate_states.only_armed)
        self._gate_states = gate_states
        self._split_scores = split_scores
        self._expected: in_flight.ExpectedCounts | None = None
        self._scored: ScoredRuns | None = None  # of the last step with scores
        self._no_scores = memory.buffers.scores[:0]
        self._in_flight: deque[in_flight.InFlightStep] = deque()

    def arm(self, plan: StepPlan, batch: StepBatch) -> None:
        """Set the buffers for the step that is queued next."""
        self.counts.active += 1
        self.counts.ring_last = plan.num_units
        self.counts.ring_most = max(self.counts.ring_most, plan.num_units)
        first = self._transport.reserve(plan.num_units)
        self._armed.arm(plan.tokens, first)
        self._gate_states.arm(plan.runs)
        if plan.by_id:
            ids = batch.token_ids()
            self._buffers.ids[: ids.shape[0], layout.TOKEN_ID].copy_(ids)
        positions = None if batch.unknown is None else self._copy_positions(plan, batch.unknown)
        self.prepared = in_flight.PreparedStep(plan, first, positions, batch)

    def disarm(self) -> None:
        """Disarm the buffers for a forward pass without a program."""
        self._armed.disarm()

    def _copy_positions(self, plan: StepPlan, unknown: UnknownPositions) -> Copy | None:
        """Start to copy the rows' positions from the device, if the host does not know them."""
        if plan.runs.exact:
            return None
        positions = unknown.positions()
        if plan.device_positions:
            column = self._buffers.tokens[: positions.shape[0], layout.POSITION]
            column.copy_(positions)
        return self._transport.copy(positions)

    def record(self) -> None:
        """Start to copy results of the queued step, and add its rows and scores to the indexes."""
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        self._gate_states.disarm()
        plan = prepared.plan
        batches: Sequence[CodecBatch] = plan.batches
        logits: StepLogits = {}
        self._patterns.count(prepared, self.counts.steps)
        if batches:
            logits = self._patterns.compute(prepared)  # of all rows, also those that are dropped
            if self._slots.has_dropped and self._slots.incomplete[plan.runs.slot].any():
                incomplete = self._slots.incomplete[plan.runs.slot]
                self._slots.drop(plan.runs, np.flatnonzero(incomplete))
                batches = plan.batches_of(~incomplete)
            # Of some records a rank returns nothing: scores, or logits that another one returns.
            batches = [batch for batch in batches if self._codecs.row_bytes(batch.codec)]
        tally, scores = self._armed.tally, self._no_scores
        if plan.scored or (self.kept and self.kept.remembers(plan.runs.slot).any()):
            scores = self._armed.scores
        if plan.scored and self._slots.num_reporting and self._split_scores is not None:
            self._split_scores.join(prepared, self._slots, scores)
        shipment = self._ship(prepared, batches, tally, scores, logits)
        if plan.num_units:
            self._armed.close_ring()
        self._in_flight.append(in_flight.InFlightStep(self.counts.steps, prepared, shipment))
        self._slots.last_step[plan.runs.slot] = self.counts.steps
        for batch in self._record_rows(prepared, batches, shipment):
            alone = batch.alone()
            again = self._ship(prepared, alone, tally[:0], scores[:0], logits)
            for lost in self._record_rows(prepared, alone, again):
                self._slots.drop(plan.runs, lost.runs)
        scored = None
        if plan.scored:
            scored = self._scored
            if scored is None or not plan.runs.has_rows_of(scored.of):
                scored = self._scored = ScoredRuns(plan.runs, self._slots)
            position = in_flight.positions_of(prepared, scored.chosen)
            self.scores.add(shipment, scored.serial, position, (scored.length, scored.row))
        cached = self._record_cached(prepared, shipment)
        if scored is not None and scored.ids:
            self.reported = reported_scores(prepared, shipment, scored, cached)
        else:
            self.reported = StepScores(lambda: scores_with_cached(None, cached)) if cached else None

    def record_idle(self) -> None:
        """Add the scores that requests have from the cache and that began with a step without a
        program.
        """
        self._patterns.count(None, self.counts.steps)
        cached = self._record_cached(None, None)
        if cached:
            self.reported = StepScores(lambda: scores_with_cached(None, cached))

    def _record_cached(
        self, prepared: in_flight.PreparedStep | None, shipment: Shipment | None
    ) -> Cached:
        """Keep a step's scores; add those of cached tokens to the index; return reported ones."""
        if not self.kept:
            return {}
        self.kept.record(prepared, shipment, self.counts.steps)
        reported = {}
        for cached in self.kept.take_new():
            start = np.zeros(1, np.int64)
            serials = self._slots.serials(np.array([cached.slot]))
            self.scores.add(cached, serials, start, (np.array([cached.length]), start))
            request = self._slots.by_slot(cached.slot)
            if request is not None and request.reports:
                reported[request.id] = cached
        return reported

    def _ship(
        self,
        prepared: in_flight.PreparedStep,
        batches: Sequence[CodecBatch],
        tally: Tensor,
        scores: Tensor,
        logits: StepLogits,
    ) -> Shipment:
        parcels = []
        for batch in batches:
            first, encoding = prepared.first + batch.first, self._codecs.encoding(batch.codec)
            nbytes = batch.num_units // encoding.units * self._codecs.row_bytes(batch.codec)
            encoded = self._patterns.encode(prepared, batch, logits)
            parcels.append(Parcel(first, batch.num_units, nbytes, encoding, encoded))
        return self._transport.ship(parcels, tally, scores)

    def _record_rows(
        self, prepared: in_flight.PreparedStep, batches: Sequence[CodecBatch], shipment: Shipment
    ) -> list[CodecBatch]:
        """Add the rows of a shipment to the index; return those that did not fit."""
        missing = []
        for batch, extent in zip(batches, shipment.extents, strict=True):
            if extent is None:
                missing.append(batch)
                continue
            units = self._codecs.encoding(batch.codec).units
            self.rows.record(
                ArenaRows(shipment, extent, self._codecs.row_bytes(batch.codec), self._arena),
                batch.serial,
                in_flight.positions_of(prepared, batch.runs),
                batch.length,
                batch.record if units == 1 else batch.record // units,
                batch.kind,
            )
        return missing

    @property
    def settled(self) -> int:
        return self._in_flight[0].number - 1 if self._in_flight else self.counts.steps

    def settle(self) -> None:
        """Verify the steps whose results are on the host."""
        while self._in_flight and self._in_flight[0].shipment.ready():
            self._settle_oldest()

    def settle_until(self, number: int) -> None:
        """Verify all steps up to a number, waiting for these, and others that are on the host."""
        while self._in_flight and self._in_flight[0].number <= number:
            self._settle_oldest()
        self.settle()

    def last_step_of(self, requests: Sequence[RequestState]) -> int:
        """Return the number of the last step with a row of these requests; 0 if there is none."""
        last = self._slots.last_step
        return max((int(last[request.slot]) for request in requests), default=0)

    def _settle_oldest(self) -> None:
        step = self._in_flight.popleft()
        self._verify(step)
        if self.kept:
            self.kept.settle(step.number)
        if self.sums is not None:
            self.sums.carry_out(step.number)
        step.shipment.free_staging()

    def _verify(self, step: in_flight.InFlightStep) -> None:
        """Compare what the device counted for each token with the plan."""
        plan = step.prepared.plan
        if step.prepared.positions is not None:
            positions = step.prepared.positions.values().numpy()[plan.active]
            plan = plan._replace(positions=positions.astype(np.int64))
        expected = self._expected
        if expected is None or expected.tokens is not plan.tokens:
            expected = self._expected = in_flight.ExpectedCounts(plan, self._signature.signature)
        every = step.shipment.tally().numpy()[plan.active]
        if plan.doses:
            add_doses(plan, every[:, layout.DOSES : layout.DOSES + plan.doses], self._slots)
        tally = every[:, : layout.TALLY_COLUMNS]
        if tally.tobytes() == expected.tally:
            self._slots.states.set(plan, expected.states)
            return
        edits = tally[:, layout.EDITS].astype(np.int64)
        self._slots.record(plan, edits, tally[:, layout.NONFINITE] != 0)
        wrong = (
            (tally[:, layout.SIGNATURE] != self._signature.signature)
            | (edits < plan.fewest)
            | (edits > plan.most)
            | (tally[:, layout.CAPTURES] != plan.captures)
        )
        for row in np.flatnonzero(wrong).tolist():
            request = self._slots.by_slot(int(plan.slots[row]))
            if request is None or request.problem:
                continue
            signature, captures = int(tally[row, layout.SIGNATURE]), tally[row, layout.CAPTURES]
            self._slots.fail(
                request,
                int(plan.positions[row]),
                f"position {plan.positions[row]}: expected {in_flight.bounds(plan, row)} edits and "
                f"{plan.captures[row]} captured vectors, the device counted {edits[row]} and "
                f"{captures}; {self._signature.diagnose(signature)}",
            )

    def check_integrity(self) -> None:
        """Check that no step is prepared and that the device has the armed tokens."""
        assert self.prepared is None
        self._armed.check_integrity()


Cached = Mapping[str, CachedScores]  # of requests that report, by vLLM's id


def add_doses(plan: StepPlan, bits: NDArray[np.int32], slots: SlotTable) -> None:
    """Add a step's doses of edits; end requests with one that is beyond the bound."""
    doses = slots.doses
    doses.add(plan.slots, plan.positions, bits)
    for row, column, dose in doses.above(bits):
        request, position = slots.by_slot(int(plan.slots[row])), int(plan.positions[row])
        if request is not None and not request.problem:
            changed = request.name_edit(position, column)
            slots.fail(
                request,
                position,
                f"position {position}: {changed} by {dose:.3g} times its length, and the "
                f"setting max_dose is {doses.bound:g}; use a smaller scale",
            )


class ScoredRuns:
    """The runs of a step with scores; a step that repeats another one has the same."""

    __slots__ = ("chosen", "ids", "length", "lengths", "of", "reporting", "row", "rows", "serial")

    def __init__(self, of: TokenRuns, slots: SlotTable) -> None:
        self.of = of
        self.chosen = np.flatnonzero(of.scored > 0)
        self.serial = slots.serials(of.slot[self.chosen])
        self.length, self.row = of.length[self.chosen], of.row[self.chosen]
        # Those of requests that report their scores, with vLLM's ids of these.
        self.reporting = self.chosen[slots.reports[of.slot[self.chosen]]]
        self.ids = slots.ids_of(of.slot[self.reporting])
        self.lengths, self.rows = (
            of.length[self.reporting].tolist(),
            of.row[self.reporting].tolist(),
        )


def reported_scores(
    prepared: in_flight.PreparedStep, shipment: Shipment, scored: ScoredRuns, cached: Cached
) -> StepScores:
    """Return the scores that requests of a queued step report."""
    position = in_flight.positions_of(prepared, scored.reporting)

    def read() -> ScoresOfStep:
        values = shipment.scores().values.numpy()
        known = known_positions(position)
        scores = scores_of_runs(scored.ids, known.tolist(), scored.rows, scored.lengths, values)
        return scores_with_cached(scores, cached) if cached else scores

    return StepScores(read)


def scores_with_cached(scores: ScoresOfStep | None, cached: Cached) -> ScoresOfStep:
    """Return a step's scores, of requests that began with it also those of their cached tokens."""
    values = [cached_scores.scores().values.numpy() for cached_scores in cached.values()]
    if scores is None:
        scores = ScoresOfStep([], [], [], [], np.zeros((0, values[0].shape[1]), np.float32))
    ids = [*scores.ids, *(name for name in cached if name not in scores.ids)]
    first, row = list(scores.first), list(scores.row)
    length, parts, end = list(scores.length), [scores.values], scores.values.shape[0]
    for (name, cached_scores), mine in zip(cached.items(), values, strict=True):
        index = ids.index(name)
        parts.append(mine)
        if index < len(first):
            # One run without a gap: positions between the two have no score that anybody reads.
            gap = np.zeros((first[index] - cached_scores.length, mine.shape[1]), np.float32)
            parts += [gap, scores.values[row[index] : row[index] + length[index]]]
            length[index] += first[index]
            first[index], row[index] = 0, end
        else:
            first.append(0)
            row.append(end)
            length.append(cached_scores.length)
        end = row[index] + length[index]
    return ScoresOfStep(ids, first, row, length, np.concatenate(parts))
