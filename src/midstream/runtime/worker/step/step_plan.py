"""What one step asks of the device: its runs of rows, and what must come of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.runs import Ints


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Runs of consecutive rows of one request within one segment; one entry per run.

    Attributes:
        row: first row in the batch.
        length: rows.
        position: of the first row in its request; see `exact`.
        slot: the request's slot.
        program, group, width, kind: what each row gets, how many vectors its record holds, and
            what the ledger calls such records.
        scored: 1 where the rows' scores go to the caller.
        codec: how the rows' vectors leave; those of one codec lie together in the ring.
        record: first row of the ring, counted from the step's first; meaningful where width > 0.
        exact: whether the positions are known. Otherwise they are upper bounds, the device knows
            better, and all else here is the same wherever the rows really are.
    """

    row: Ints
    length: Ints
    position: Ints
    slot: Ints
    program: Ints
    group: Ints
    width: Ints
    kind: Ints
    scored: Ints
    codec: Ints
    record: Ints
    exact: bool


@dataclass(frozen=True, slots=True)
class CodecBatch:
    """A step's captured rows of one codec, which lie together in the ring.

    Attributes:
        codec: its number.
        first: first row of the ring, counted from the step's first.
        num_rows: how many.
        mine: which of the step's pieces these are of.
        serial, length, kind: of each of those, as in the ledger; first row: `record`, from `first`.
    """

    codec: int
    first: int
    num_rows: int
    mine: Ints
    serial: Ints
    length: Ints
    kind: Ints
    record: Ints


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step asks of the device, and what it must have done afterwards.

    Attributes:
        tokens: int32 [rows, 4], for `Buffers.tokens`; records count from the step's first row.
        num_records: rows of the ring that the step fills.
        active: rows of the batch with a program.
        slots, positions: of each active row (slot −1: nobody's, only watched); the latter are
            upper bounds where `pieces` are not exact.
        fewest, most: how many edits each active row must get; how many it may, where that
            depends on the token's id.
        captures: how many vectors each active row must give.
        by_id: whether a row's program reads its token's id.
        scored: whether a score of the step goes to a caller.
        told: whether a row's program reads its position, which only the device knows: the column
            in `tokens` is to be filled in there.
        pieces: the runs that the step is made of.
        loads: what is captured, in the order of the ring.
    """

    tokens: NDArray[np.int32]
    num_records: int
    active: Ints
    slots: Ints
    positions: Ints
    fewest: Ints
    most: Ints
    captures: Ints
    by_id: bool
    scored: bool
    told: bool
    pieces: TokenRuns
    loads: tuple[CodecBatch, ...]

    def at(self, position: Ints) -> StepPlan:
        """The same step at other positions, one for each active row and piece."""
        was = self.pieces
        pieces = TokenRuns(
            was.row, was.length, position, was.slot, was.program, was.group, was.width, was.kind,
            was.scored, was.codec, was.record, was.exact,
        )  # fmt: skip
        return StepPlan(
            self.tokens, self.num_records, self.active, self.slots, position, self.fewest,
            self.most, self.captures, self.by_id, self.scored, self.told, pieces, self.loads,
        )  # fmt: skip
