"""Midstream in one worker: the parts that a step and a request pass, with either model runner."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midstream.codecs import RowEncoding
from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.protocol.step_scores import StepScores
from midstream.runtime.worker.automaton_states import AutomatonStates
from midstream.runtime.worker.collection import Collection
from midstream.runtime.worker.gate_states import GateStates
from midstream.runtime.worker.logit_bias import LogitBias
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.rank_agreement import ALONE, RankLinks
from midstream.runtime.worker.readouts.reader import PatternReader
from midstream.runtime.worker.readouts.step_patterns import StepPatterns
from midstream.runtime.worker.reductions import Reductions
from midstream.runtime.worker.request_resources import RequestResources
from midstream.runtime.worker.request_table import RequestTable
from midstream.runtime.worker.split_scores import SplitScores
from midstream.runtime.worker.step.doses import Doses
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.step_recorder import RankMemory, StepCounts, StepRecorder
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.tables.program_table import ProgramTable
from midstream.runtime.worker.taps.local_calls import LocalCalls


@dataclass(frozen=True, slots=True)
class StepRules:
    """Settings of the steps of one worker."""

    max_model_len: int
    on_nonfinite: str = "raise"
    max_dose: float | None = None
    only_armed: bool = False  # every forward pass that fires taps is a step with a plan
    calls_functions: bool = False  # edits may be functions of this process


class WorkerSession:
    """Plans and arms each step before its forward pass, and records what it captured afterwards."""

    def __init__(
        self,
        memory: RankMemory,
        rules: StepRules,
        links: RankLinks = ALONE,
        patterns: PatternReader | None = None,
        reductions: Reductions | None = None,
    ) -> None:
        buffers, taps, share = memory.buffers, memory.taps, links.share
        if reductions is None:
            reductions = Reductions(0, 1, buffers.ring.device)
        self._reductions = reductions
        reductions.kept = memory.sums
        ring, device_rows = buffers.ring, memory.device_rows
        if device_rows is None:
            device_rows = DeviceRowTable(0, 1, taps, ring.dtype, ring.device)
        self._device_rows = device_rows
        self.checksum = links.checksum
        self._codecs = CodecTable(buffers)
        self._tables = ProgramTable(buffers, device_rows)
        doses = Doses(buffers.doses, buffers.scan_states.shape[1], rules.max_dose)
        slots = SlotTable(rules.max_model_len, rules.on_nonfinite, doses)
        self._slots = slots
        self._gate_states = GateStates(buffers, rules.only_armed)
        self._automata = AutomatonStates(buffers)
        self._planner = StepPlanner(slots, self._tables)
        self._local = LocalCalls(taps, buffers, slots) if rules.calls_functions else None
        buffers.before = self._local
        add_up = links.add_up
        self._recorder = StepRecorder(
            memory,
            slots,
            self._codecs,
            self._gate_states,
            StepPatterns(buffers, slots, self._codecs, patterns, reductions, device_rows),
            None if add_up is None else SplitScores(share.rank, share.ranks, add_up),
        )
        plans = PlanTable(self._tables, self._codecs, self._recorder.rows, taps, share)
        widths = tuple(map(buffers.width, taps.values()))
        load = None if self._local is None else self._local.load
        states = self._gate_states, self._automata
        resources = RequestResources(plans, states, (reductions, widths), load, device_rows)
        self.requests = RequestTable(slots, resources, self._recorder, links)
        weights = self.requests.weights
        device_rows.weights = lambda: weights.current.number
        self.bias = LogitBias(buffers.switches) if buffers.switches.shape[0] else None
        self.collection = Collection(self.requests, self._recorder)

    @property
    def counts(self) -> StepCounts:
        return self._recorder.counts

    @property
    def has_reports(self) -> bool:
        """Whether failures or scores are to leave with the output of a step."""
        return self._recorder.reported is not None or bool(self._slots.failures)

    @property
    def reported_scores(self) -> StepScores | None:
        """Scores of the last step that leave with its output; None: no request reports any."""
        return self._recorder.reported

    def clear_reported_scores(self) -> None:
        self._recorder.reported = None

    def encoding(self, number: int) -> RowEncoding:
        return self._codecs.encoding(number)

    def before_forward(self, batch: StepBatch) -> bool:
        """Plan and arm the next step; return whether it must run the tapped model."""
        recorder = self._recorder
        began = time.perf_counter_ns()
        plan = self._planner.plan(batch)
        recorder.counts.steps += 1
        self.requests.weights.begin_step(recorder.counts.steps)
        recorder.counts.planner_ns += time.perf_counter_ns() - began
        if self._recorder.sums is not None:
            self._recorder.sums.reach(batch, self._slot_of)
        if self.checksum is not None:
            self.checksum.add_step(batch, plan, self._tables)
        if self._local is not None:
            self._local.prepare(plan, batch)
        if self.bias is not None:
            self.bias.drop()
        if plan is None:
            recorder.disarm()
        else:
            recorder.arm(plan, batch)
            self._automata.arm(plan.runs, batch)
            if self.bias is not None:
                self.bias.prepare(batch, plan, self.requests.biases_of)
        return plan is not None

    def after_forward(self) -> None:
        """Record the step whose forward pass was queued, and settle those that are on the host."""
        if self._local is not None:
            self._local.finish()
        if self._recorder.prepared is not None:
            self._recorder.record()
            self.requests.settle()
        else:
            self._recorder.record_idle()

    @property
    def keeps_scores(self) -> bool:
        """Whether scores are kept of running requests."""
        return self._recorder.kept is not None and len(self._recorder.kept) > 0

    def place_scores(
        self,
        request_id: str,
        scores: tuple[KeptScore, ...],
        blocks: Sequence[Sequence[int]],
        cached: int,
        has_grown: bool = False,
    ) -> None:
        """Note where the scores of a request that is about to run are kept, by its blocks; those of
        one that runs again are known. A session that has grown by an input computed its `cached`
        tokens itself: it has their scores and sums, and no block keeps all of these.
        """
        kept, request = self._recorder.kept, self.requests.running(request_id)
        if kept is None or request is None or request.problem:
            return
        if kept.has(request.slot):  # its rows so far were in other blocks
            self.requests.settle_requests([request])
        elif not scores:
            return
        placed = self._gate_states.placed(request.slot, scores)
        kept.place(request.slot, placed, blocks, 0 if has_grown else cached)
        if cached and kept.has(request.slot):
            steps = self.counts.steps
            self._gate_states.restore(
                request.slot, cached, lambda at: kept.values_at(request.slot, at, steps)
            )
        if not has_grown:
            self._reductions.place(request.slot, scores, cached)

    def add_blocks(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """Note more blocks of a running request."""
        kept, request = self._recorder.kept, self.requests.running(request_id)
        if kept is not None and request is not None and kept.has(request.slot):
            first = kept.blocks.extend(request.slot, blocks)
            if self._recorder.sums is not None:
                self._recorder.sums.renew(request.slot, first)

    def drop_scores(self, keys: Sequence[str]) -> None:
        """Keep some scores no longer, by key."""
        if self._recorder.kept is not None:
            self._recorder.settle_until(self.counts.steps)
            self._recorder.kept.drop(keys)

    def blank_scores(self, key: str, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep NaN as a score of some tokens of each of some blocks."""
        if self._recorder.kept is not None:
            self._recorder.settle_until(self.counts.steps)
            self._recorder.kept.blank(key, blocks, tokens)

    def keep_sums(self) -> None:
        """Keep sums at the ends of blocks from now on."""
        if self._recorder.sums is not None:
            self._recorder.sums.is_on = True

    def drop_sums(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """Keep some sums no longer, by key those of some blocks."""
        if self._recorder.sums is not None:
            self._recorder.sums.drop(blocks)

    def _slot_of(self, request_id: str) -> int | None:
        request = self.requests.running(request_id)
        return None if request is None else request.slot

    def check_integrity(self) -> None:
        """Check invariants that hold between steps; cheap."""
        self._recorder.check_integrity()
        self._tables.check_integrity()
        self._reductions.check_integrity()
        self._device_rows.check_integrity()
        self._gate_states.check_integrity()
        self._automata.check_integrity()
        if self.requests.is_empty:
            assert not len(self.requests.plans)
            assert not len(self._reductions)
            assert not len(self._gate_states)
            assert not len(self._automata)
            assert not len(self._recorder.rows)
            assert not len(self._recorder.scores)
            assert self._recorder.kept is None or not len(self._recorder.kept)
