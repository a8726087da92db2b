"""The plan of one step: its runs of rows, and what the device must have done for each row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.runs import Ints


class TokenRuns(NamedTuple):
    """Runs of consecutive rows of one request within one segment; arrays have one entry per run."""

    row: Ints
    length: Ints
    position: Ints  # of the first row in its request; see `exact`
    slot: Ints
    program: Ints
    group: Ints
    vectors: Ints  # number in each row's record
    units: Ints  # of each row's record; see `Buffers.units`
    kind: Ints  # of record, from `CapturedRowIndex.kind`
    scored: Ints  # 1 if the scores of the rows are returned to the caller
    codec: Ints  # number of the encoding, whose records are contiguous in the ring
    record: Ints  # ring unit of the first record, relative to the step's first; valid if units > 0
    exact: bool  # if not, only the device knows positions: these are bounds, all else is the same

    def has_rows_of(self, last: TokenRuns) -> bool:
        """Return whether the step repeats the rows of another; see `StepPlan.at`."""
        return self.row is last.row and self.length is last.length and self.slot is last.slot


class CodecBatch(NamedTuple):
    """A step's captured rows of one encoding, which are contiguous in the ring."""

    codec: int
    first: int  # ring unit, relative to the step's first
    num_units: int
    runs: Ints  # indices of the step's runs that these rows belong to
    serial: Ints  # number of each run's request
    length: Ints  # number of records of each run
    kind: Ints
    record: Ints  # ring unit of each run's first record, relative to `first`

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

    def alone(self) -> list[CodecBatch]:
        """Return the rows of each run, those of the oldest request first."""
        parts = [self.between(run, run + 1) for run in range(self.runs.size)]
        return sorted(parts, key=lambda part: int(part.serial[0]))

    def stretches(self, chosen: NDArray[np.bool_]) -> list[CodecBatch]:
        """Return the rows of some runs, each stretch of neighbours together."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        return [self.between(*ends) for ends in edges.reshape(-1, 2).tolist()]


class StepPlan(NamedTuple):
    """What the device is to do in one step, and what it must have counted afterwards."""

    tokens: NDArray[np.int32]  # [rows, TOKEN_COLUMNS]; records are relative to the step's unit
    num_units: int  # of the ring, that the step fills
    active: slice | Ints  # rows of the batch that have a program
    slots: Ints
    positions: Ints  # of each active row; an upper bound if `runs` are not exact
    fewest: NDArray[np.int32]  # edits that each active row must get
    most: NDArray[np.int32]  # edits that it may get; the others depend on the token's id
    captures: Ints  # vectors that must be captured of each active row
    by_id: bool  # a row's program reads the token's id
    doses: int  # columns of doses that the rows' programs have
    scored: bool  # a score of the step is returned to a caller
    device_positions: bool  # the device must fill in the column `POSITION` of `tokens`
    runs: TokenRuns
    batches: tuple[CodecBatch, ...]  # captured rows by codec, in the order of the ring

    def batches_of(self, chosen: NDArray[np.bool_]) -> list[CodecBatch]:
        """Return the captured rows of some runs only."""
        return [part for batch in self.batches for part in batch.stretches(chosen[batch.runs])]

    def at(self, position: Ints) -> StepPlan:
        """Return the same step at other positions, one for each run; each run has one row."""
        # `_replace` takes three times as long.
        runs = TokenRuns._make((*self.runs[:2], position, *self.runs[3:]))
        return StepPlan._make((*self[:4], position, *self[5:-2], runs, self.batches))

    def of(self, slot: Ints, serial: Ints) -> StepPlan:
        """Return the same step of other requests, by the slot of each run."""
        runs = self.runs._replace(slot=slot)
        batches = [batch._replace(serial=serial[batch.runs]) for batch in self.batches]
        slots = np.repeat(slot, runs.length)
        return self._replace(slots=slots, runs=runs, batches=tuple(batches))
