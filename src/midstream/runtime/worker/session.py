"""Midstream in one worker: the parts that a step and a request pass, with either model runner."""

from __future__ import annotations

import time

from midstream.codecs import RowEncoding
from midstream.runtime.protocol.segments import RankShare
from midstream.runtime.protocol.step_scores import StepScores
from midstream.runtime.worker.collection import Collection
from midstream.runtime.worker.gate_states import GateStates
from midstream.runtime.worker.logit_bias import LogitBias
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.readouts.reader import PatternReader
from midstream.runtime.worker.reductions import Reductions
from midstream.runtime.worker.request_table import Agree, RequestTable
from midstream.runtime.worker.split_scores import SplitScores, SumOverRanks
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_planner import StepPlanner
from midstream.runtime.worker.step_recorder import StepCounts, StepRecorder
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.tables.program_table import ProgramTable
from midstream.runtime.worker.taps.local_calls import LocalCalls
from midstream.sites import Tap
from midstream.transport.arena import Arena
from midstream.transport.base import Transport


class WorkerSession:
    """Plans and arms each step before its forward pass, and records what it captured afterwards.

    All device work is queued on the current stream. So "before" and "after" hold on the device
    even if the host runs ahead.

    Attributes:
        bias: adds biases to logits; None where these are not tapped on this rank.
    """

    def __init__(
        self,
        buffers: Buffers,
        taps: dict[Tap, int],
        transport: Transport,
        arena: Arena,
        max_model_len: int,
        share: RankShare,
        checksum: RankChecksum | None = None,
        on_nonfinite: str = "raise",
        only_armed: bool = False,
        patterns: PatternReader | None = None,
        agree: Agree | None = None,
        reductions: Reductions | None = None,
        calls_functions: bool = False,
        add_up: SumOverRanks | None = None,
    ) -> None:
        """Args:
        taps: the rank's taps and their indices.
        transport: owner of `buffers.ring`.
        arena: memory that the transport copies rows to.
        share: the part of the captured vectors that this rank transfers.
        checksum: receives every plan and step; None if ranks are not compared.
        only_armed: whether every forward pass that fires the taps is a step with a plan, as where
            all other steps run vLLM's own model.
        patterns: makes rows of attention and logits; None: no request asks for any.
        agree: see `RequestTable`.
        reductions: what requests reduce rows to; None: there is no room for any.
        add_up: sums values over the ranks; None: there is one.
        """
        if reductions is None:
            reductions = Reductions(0, 1, buffers.ring.device)
        self._reductions = reductions
        self._checksum = checksum
        self._codecs = CodecTable(buffers)
        self._tables = ProgramTable(buffers)
        slots = SlotTable(max_model_len, on_nonfinite)
        self._gate_states = GateStates(buffers, only_armed)
        self._planner = StepPlanner(slots, self._tables)
        self._local = LocalCalls(taps, buffers, slots) if calls_functions else None
        buffers.before = self._local
        self._recorder = StepRecorder(
            buffers,
            transport,
            arena,
            slots,
            self._codecs,
            taps,
            only_armed=only_armed,
            patterns=patterns,
            reductions=self._reductions,
            gate_states=self._gate_states,
            split_scores=(None if add_up is None else SplitScores(share.rank, share.ranks, add_up)),
        )
        plans = PlanTable(self._tables, self._codecs, self._recorder.rows, taps, share)
        widths = tuple(map(buffers.width, taps.values()))
        load = None if self._local is None else self._local.load
        self.requests = RequestTable(
            slots,
            plans,
            self._recorder,
            self._gate_states,
            checksum,
            agree,
            (self._reductions, widths),
            load,
        )
        self.bias = LogitBias(buffers.switches) if buffers.switches.shape[0] else None
        self.collection = Collection(self.requests, self._recorder)

    @property
    def counts(self) -> StepCounts:
        """Totals over all steps."""
        return self._recorder.counts

    @property
    def reported_scores(self) -> StepScores | None:
        """Scores of the last step that leave with its output; None: no request reports any."""
        return self._recorder.reported

    def clear_reported_scores(self) -> None:
        """Clear the scores, which have left."""
        self._recorder.reported = None

    def encoding(self, number: int) -> RowEncoding:
        """Return the encoding with a number, as `RowBlock.codec` has it."""
        return self._codecs.encoding(number)

    def before_forward(self, batch: StepBatch) -> bool:
        """Plan and arm the step whose forward pass is queued next.

        Returns:
            Whether a row has a program, so that the step must run the tapped model.
        """
        recorder = self._recorder
        began = time.perf_counter_ns()
        plan = self._planner.plan(batch)
        recorder.counts.steps += 1
        recorder.counts.planner_ns += time.perf_counter_ns() - began
        if self._checksum is not None:
            self._checksum.add_step(batch, plan, self._tables)
        if self._local is not None:
            self._local.prepare(plan, batch)
        if self.bias is not None:
            self.bias.drop()
        if plan is None:
            recorder.disarm()
        else:
            recorder.arm(plan, batch)
            if self.bias is not None:
                self.bias.prepare(batch, plan, self.requests.biases_of)
        return plan is not None

    def after_forward(self) -> None:
        """Record the step whose forward pass was queued, and settle steps whose results are on the
        host.
        """
        if self._local is not None:
            self._local.finish()
        if self._recorder.prepared is not None:
            self._recorder.record()
            self.requests.settle()

    def check_integrity(self) -> None:
        """Check invariants that hold between steps; cheap."""
        self._recorder.check_integrity()
        self._tables.check_integrity()
        self._reductions.check_integrity()
        self._gate_states.check_integrity()
        if self.requests.is_empty:
            assert not len(self.requests.plans)
            assert not len(self._reductions)
            assert not len(self._gate_states)
            assert not len(self._recorder.rows)
            assert not len(self._recorder.scores)
