"""The plan of one step: its runs of rows, and what the device must have done for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.runs import Ints


@dataclass(slots=True)  # not frozen, as frozen instances take longer to make, in each step
class TokenRuns:
    """Runs of consecutive rows of one request within one segment; each array has one entry per run.

    Attributes:
        position: position of the first row in its request; see `exact`.
        vectors: number of vectors in each row's record.
        units: number of ring units of each row's record; see `Buffers.units`.
        kind: number of the kind of record, from `CapturedRowIndex.kind`.
        scored: 1 if the scores of the rows are returned to the caller.
        codec: number of the rows' encoding; the records of one encoding are contiguous in the ring.
        record: ring unit of the first record, relative to the step's first; valid if units > 0.
        exact: whether the positions are known. If not, they are upper bounds, only the device
            knows the positions, and everything else is the same at each possible position.
    """

    row: Ints
    length: Ints
    position: Ints
    slot: Ints
    program: Ints
    group: Ints
    vectors: Ints
    units: Ints
    kind: Ints
    scored: Ints
    codec: Ints
    record: Ints
    exact: bool


@dataclass(frozen=True, slots=True)
class CodecBatch:
    """A step's captured rows of one encoding, which are contiguous in the ring.

    Attributes:
        first: first ring unit, relative to the step's first.
        runs: indices of the step's runs that these rows belong to.
        serial: serial number of each run's request.
        length: number of records of each run.
        record: ring unit of each run's first record, relative to `first`.
    """

    codec: int
    first: int
    num_units: int
    runs: Ints
    serial: Ints
    length: Ints
    kind: Ints
    record: Ints

    def between(self, begin: int, stop: int) -> CodecBatch:
        """Return the rows of the runs [begin, stop) of `runs`, which are contiguous as well."""
        first = int(self.record[begin])
        end = int(self.record[stop]) if stop < self.record.size else self.num_units
        return CodecBatch(
            self.codec,
            self.first + first,
            end - first,
            self.runs[begin:stop],
            self.serial[begin:stop],
            self.length[begin:stop],
            self.kind[begin:stop],
            self.record[begin:stop] - first,
        )

    def of(self, serial: Ints) -> CodecBatch:
        """Return the same rows of other requests, by the serial number of each run's."""
        return CodecBatch(
            self.codec,
            self.first,
            self.num_units,
            self.runs,
            serial,
            self.length,
            self.kind,
            self.record,
        )

    def alone(self) -> list[CodecBatch]:
        """Return the rows of each run, those of the oldest request first."""
        parts = [self.between(run, run + 1) for run in range(self.runs.size)]
        return sorted(parts, key=lambda part: int(part.serial[0]))

    def stretches(self, chosen: NDArray[np.bool_]) -> list[CodecBatch]:
        """Return the rows of some runs, each stretch of neighbours together."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        return [self.between(*ends) for ends in edges.reshape(-1, 2).tolist()]


@dataclass(slots=True)  # see `TokenRuns`
class StepPlan:
    """What the device is to do in one step, and what it must have counted afterwards.

    Attributes:
        tokens: int32 [rows, TOKEN_COLUMNS], for `Buffers.tokens`; records are relative to the
            step's first ring unit.
        num_units: number of ring units that the step fills.
        active: rows of the batch that have a program, as an index.
        positions: position of each active row; an upper bound if `runs` are not exact.
        fewest, most: number of edits that each active row must and may get; the difference is in
            edits that depend on the token's id.
        captures: number of vectors that must be captured of each active row.
        by_id: whether a row's program reads the token's id.
        scored: whether a score of the step is returned to a caller.
        device_positions: whether a program reads positions that only the device knows. It must
            then fill in the column `POSITION` of `tokens`.
        batches: captured rows by codec, in the order of the ring.
    """

    tokens: NDArray[np.int32]
    num_units: int
    active: slice | Ints
    slots: Ints
    positions: Ints
    fewest: NDArray[np.int32]
    most: NDArray[np.int32]
    captures: Ints
    by_id: bool
    scored: bool
    device_positions: bool
    runs: TokenRuns
    batches: tuple[CodecBatch, ...]

    def batches_of(self, chosen: NDArray[np.bool_]) -> list[CodecBatch]:
        """Return the captured rows of some runs only."""
        return [part for batch in self.batches for part in batch.stretches(chosen[batch.runs])]

    def at(self, position: Ints) -> StepPlan:
        """Return the same step at other positions, one for each run; each run has one row."""
        return self._with(self.runs.slot, position, self.slots, position, self.batches)

    def of(self, slot: Ints, serial: Ints) -> StepPlan:
        """Return the same step of other requests, by the slot of each run."""
        runs = self.runs
        batches = tuple([batch.of(serial[batch.runs]) for batch in self.batches])
        slots = np.repeat(slot, runs.length)
        return self._with(slot, runs.position, slots, self.positions, batches)

    def _with(
        self,
        slot: Ints,
        position: Ints,
        slots: Ints,
        positions: Ints,
        batches: tuple[CodecBatch, ...],
    ) -> StepPlan:
        """Return the step of others; `dataclasses.replace` would take more than twice as long."""
        runs = self.runs
        return StepPlan(
            tokens=self.tokens,
            num_units=self.num_units,
            active=self.active,
            slots=slots,
            positions=positions,
            fewest=self.fewest,
            most=self.most,
            captures=self.captures,
            by_id=self.by_id,
            scored=self.scored,
            device_positions=self.device_positions,
            runs=TokenRuns(
                row=runs.row,
                length=runs.length,
                position=position,
                slot=slot,
                program=runs.program,
                group=runs.group,
                vectors=runs.vectors,
                units=runs.units,
                kind=runs.kind,
                scored=runs.scored,
                codec=runs.codec,
                record=runs.record,
                exact=runs.exact,
            ),
            batches=batches,
        )
