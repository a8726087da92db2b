"""Planning of a step: what each row of its batch gets, without a loop over rows or layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.worker.step import columns
from midstream.runtime.worker.step.kept_steps import KeptSteps
from midstream.runtime.worker.step.position_states import PositionStates
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import CodecBatch, StepPlan, TokenRuns
from midstream.runtime.worker.tables.program_table import ProgramTable


@dataclass(slots=True)
class _DecodeStep:
    """A step in which every request had one row, as the next one often has, further on."""

    plan: StepPlan | None
    slots: Ints  # of the batch; the same array as long as the requests are the same
    computed: NDArray[np.int32]  # tokens of each request that were computed before the step
    chosen: Ints  # indices of the requests with a plan, whose segments are [start, stop)
    slot: Ints
    start: Ints
    stop: Ints
    active: NDArray[np.bool_] | None  # which of the chosen have a program; None: all
    by_position: NDArray[np.bool_] | None  # which runs read positions; None: none
    position: Ints
    more: int  # steps that remain within these segments, if each advances by one position

    def advance(self, batch: StepBatch, states: PositionStates) -> Ints | None:
        """Return the next positions, recorded; None: one has more rows, or another segment."""
        if batch.num_tokens != len(batch.request_ids):
            return None
        self.computed += 1
        if self.more > 0 and batch.computed.tobytes() == self.computed.tobytes():
            self.more -= 1
            self.position = self.position + 1
            states.advance_by_one(self.slot, self.position)
            return self.position
        self.computed[:] = batch.computed
        position = batch.computed[self.chosen].astype(np.int64)
        if (position < self.start).any() or (position >= self.stop).any():
            return None
        self.more = int((self.stop - position).min()) - 1
        self.position = position
        states.advance(self.slot, position, position + 1)
        return position


class StepPlanner:
    """Lays out each step for the device."""

    def __init__(self, slots: SlotTable, tables: ProgramTable) -> None:
        self._slots = slots
        self._tables = tables
        self._decode: _DecodeStep | None = None
        self._kept = KeptSteps(slots)

    def plan(self, batch: StepBatch) -> StepPlan | None:
        """Return the plan of a step; None if no row of it has a program."""
        last = self._decode
        if (
            last is not None
            and batch.unknown is None
            and self._slots.slots_of(batch.request_ids) is last.slots
        ):
            position = last.advance(batch, self._slots.states)
            if position is not None:
                return None if last.plan is None else _repeated(last, last.plan, position)
        self._decode = None
        if not len(self._slots):
            return None
        slot = self._slots.slots_of(batch.request_ids)
        chosen = np.flatnonzero(slot >= 0)
        if not chosen.size:
            return None
        slot = slot[chosen]
        key = self._kept.key_of(batch, chosen, slot)
        plan = None if key is None else self._kept.repeat(key, slot)
        if plan is not None:
            return plan
        runs = self._make_runs(batch, chosen, slot)
        plan = None if runs is None else self._lay_out(runs, batch.num_tokens)
        if plan is not None and key is not None:
            self._kept.keep(key, plan, batch, chosen, slot)
        self._remember(batch, plan)
        return plan

    def _remember(self, batch: StepBatch, plan: StepPlan | None) -> None:
        """Store a step that the next step may repeat."""
        if batch.unknown is not None or batch.num_tokens != len(batch.request_ids):
            return
        slots = self._slots.slots_of(batch.request_ids)
        chosen = np.flatnonzero(slots >= 0)
        slot = slots[chosen]
        content = self._slots.segments[slot]
        active = content[:, columns.PROGRAM] != layout.IDLE_PROGRAM
        # A request that crossed into another segment is laid out last. Such a step is rare.
        if not np.array_equal(slot[active], () if plan is None else plan.runs.slot):
            return
        position = batch.computed[chosen].astype(np.int64)
        stop = content[:, columns.STOP].copy()
        by_position = self._tables.by_position[content[active, columns.PROGRAM]]
        self._decode = _DecodeStep(
            plan=plan,
            slots=slots,
            computed=batch.computed.copy(),
            chosen=chosen,
            slot=slot,
            start=content[:, columns.START].copy(),
            stop=stop,
            active=None if active.all() else active,
            by_position=by_position if by_position.any() else None,
            position=position,
            more=int((stop - position).min()) - 1,
        )

    def _make_runs(self, batch: StepBatch, chosen: Ints, slot: Ints) -> TokenRuns | None:
        """Return the runs of a batch that have a program; None if there are none."""
        length = batch.scheduled[chosen].astype(np.int64)
        row = (np.cumsum(batch.scheduled, dtype=np.int64) - batch.scheduled)[chosen]
        lowest, position = self._bounds(batch, chosen, slot, row, length)
        stop = position + length
        exact = lowest is position or bool((lowest == position).all())

        segment = self._slots.segments[slot]
        inside = (lowest >= segment[:, columns.START]) & (stop <= segment[:, columns.STOP])
        table = np.empty((columns.RUN_COLUMNS, slot.size), np.int64)
        table[columns.RUN_ROW] = row
        table[columns.RUN_LENGTH] = length
        table[columns.RUN_POSITION] = position
        table[columns.RUN_SLOT] = slot
        table[columns.RUN_PROGRAM :] = segment[:, columns.CONTENT].T
        if not inside.all():
            crossing = [
                run
                for index in np.flatnonzero(~inside)
                for run in self._cross(
                    int(slot[index]), int(row[index]), int(position[index]), int(stop[index])
                )
            ]
            more = np.array(crossing, np.int64).reshape(-1, columns.RUN_COLUMNS)
            table = np.concatenate((table[:, inside], more.T), axis=1)
        has_program = table[columns.RUN_PROGRAM] != layout.IDLE_PROGRAM
        if not has_program.all():
            table = table[:, has_program]
        if table.shape[1] == 0:
            return None
        if table[columns.RUN_CODEC].any():
            table = table[:, np.argsort(table[columns.RUN_CODEC], kind="stable")]
        records = table[columns.RUN_LENGTH] * table[columns.RUN_UNITS]
        return TokenRuns._make((*table, np.cumsum(records) - records, exact))

    def _bounds(
        self, batch: StepBatch, chosen: Ints, slot: Ints, row: Ints, length: Ints
    ) -> tuple[Ints, Ints]:
        """Return the lowest and the highest possible position of each request's first row."""
        position = batch.computed[chosen].astype(np.int64)
        if batch.unknown is None:
            self._slots.states.advance(slot, position, position + length)
            return position, position
        lowest = np.maximum(position - batch.unknown.slack()[chosen], 0)
        self._slots.states.advance(slot, lowest, position + length)
        if self._is_undecided(slot, lowest, position, position + length):
            # What these rows get depends on their positions and must be armed before their forward
            # pass, so the host waits for the device. This is rare: a request must be at a boundary
            # between two segments.
            position = batch.unknown.positions().cpu().numpy()[row].astype(np.int64)
            return position, position
        return lowest, position

    def _is_undecided(self, slot: Ints, lowest: Ints, position: Ints, stop: Ints) -> bool:
        """Return whether the rows of some request may be in one segment or in another."""
        segment = self._slots.segments[slot]
        outside = (lowest < segment[:, columns.START]) | (stop > segment[:, columns.STOP])
        for index in np.flatnonzero(outside & (lowest < position)).tolist():
            request = self._slots.by_slot(int(slot[index]))
            assert request is not None
            if len(request.segments_within(int(lowest[index]), int(stop[index]))) > 1:
                return True
        return False

    def _cross(self, slot: int, row: int, position: int, stop: int) -> list[list[int]]:
        """Return runs, as columns, of rows that are not within the segment of their slot."""
        request = self._slots.by_slot(slot)
        assert request is not None
        runs = []
        segments = request.segments_within(position, stop)
        for segment in segments:
            start, end = max(position, segment.start), min(stop, segment.stop)
            runs.append([row + start - position, end - start, start, slot, *segment.content])
        if segments:
            self._slots.enter(slot, segments[-1])
        return runs

    def _lay_out(self, runs: TokenRuns, num_tokens: int) -> StepPlan:
        length, tables = runs.length, self._tables
        within = within_runs(length)
        # Only where a program reads it: tokens that do not change between steps are not sent again.
        by_position = tables.by_position[runs.program]
        device_positions = not runs.exact and bool(by_position.any())
        row = np.empty((length.size, layout.TOKEN_COLUMNS), np.int32)
        row[:, layout.PROGRAM] = runs.program
        row[:, layout.GROUP] = runs.group
        row[:, layout.RECORD] = np.where(runs.units > 0, runs.record + 1, 0)
        # −1 is no position, so no exact step has the same tokens as one that the device completes.
        positions = -1 if device_positions else runs.position
        row[:, layout.POSITION] = np.where(by_position, positions, 0)
        rows = np.repeat(row, length, axis=0)
        rows[:, layout.RECORD] += within * np.repeat(runs.units, length)
        if by_position.any() and not device_positions:
            rows[:, layout.POSITION] += within * np.repeat(by_position, length)
        active = _rows_of(runs, within)
        tokens = np.zeros((num_tokens, layout.TOKEN_COLUMNS), np.int32)
        tokens[active] = rows
        return StepPlan(
            tokens=tokens,
            num_units=int((length * runs.units).sum()),
            active=active,
            slots=np.repeat(runs.slot, length),
            positions=np.repeat(runs.position, length) + within,
            fewest=np.repeat(tables.fewest[runs.program], length),
            most=np.repeat(tables.most[runs.program], length),
            captures=np.repeat(runs.vectors, length),
            by_id=bool(tables.by_id[runs.program].any()),
            doses=int(tables.doses[runs.program].max()),
            scored=bool(runs.scored.any()),
            device_positions=device_positions,
            runs=runs,
            batches=self._codec_batches(runs),
        )

    def _codec_batches(self, runs: TokenRuns) -> tuple[CodecBatch, ...]:
        units = runs.length * runs.units
        batches = []
        first = 0
        for codec in sorted(set(runs.codec[units > 0].tolist())):
            chosen = np.flatnonzero((units > 0) & (runs.codec == codec))
            count = int(units[chosen].sum())
            batches.append(
                CodecBatch(
                    codec=codec,
                    first=first,
                    num_units=count,
                    runs=chosen,
                    serial=self._slots.serials(runs.slot[chosen]),
                    length=runs.length[chosen],
                    kind=runs.kind[chosen],
                    record=runs.record[chosen] - first,
                )
            )
            first += count
        return tuple(batches)


def _repeated(last: _DecodeStep, plan: StepPlan, position: Ints) -> StepPlan:
    """Return the last step's plan at new positions of the chosen requests."""
    plan = plan.at(position if last.active is None else position[last.active])
    if last.by_position is not None:
        plan = plan._replace(tokens=plan.tokens.copy())  # the last are compared with these
        read = np.where(last.by_position, plan.positions, 0)
        plan.tokens[plan.active, layout.POSITION] = read
    return plan


def _rows_of(runs: TokenRuns, within: Ints) -> slice | Ints:
    """Return the rows of all runs, as an index. A slice is many times as fast to use."""
    row, stop = runs.row, runs.row + runs.length
    if (row[1:] == stop[:-1]).all():
        return slice(int(row[0]), int(stop[-1]))
    return np.repeat(row, runs.length) + within
