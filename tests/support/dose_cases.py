"""Cases of the `site` op whose edits are measured, and their doses by plain formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from support.site_cases import VOCABULARY, Case, Step, case
from support.site_oracle import expected

COLUMNS = 3
_FIRST, _LAST = Flags.FRESH, Flags.COUNTED
_BOTH = _FIRST | _LAST
_GATED = Flags.GATED | Flags.COUNTED
_EVERY_ID = tuple(range(VOCABULARY))
# Of each program its edits: lists of instructions, each with the column of its dose.
Edits = list[tuple[int | None, list[Step]]]


def programs(width: int) -> list[Edits]:
    part = 0.3 / width**0.5
    plain, other = Step(Op.ADD, write=1, a=0.7), Step(Op.ADD, write=2, a=-0.4)
    kept = replace(plain, flags=_BOTH | Flags.KEEP)
    gated = replace(plain, flags=_GATED)
    line = Step(Op.LINEAR, read=3, write=3, a=-part)
    return [
        [(0, [plain])],
        [(0, [plain]), (1, [other])],
        [(2, [plain]), (None, [other]), (0, [plain])],
        [(None, [replace(other, flags=_LAST)]), (1, [plain])],
        [(1, [replace(plain, flags=_FIRST), replace(other, flags=_LAST)]), (0, [plain])],
        [(0, [line]), (2, [plain])],
        [(0, [Step(Op.ADD_MATCHED, write=4, a=part, flags=_BOTH)]), (1, [kept])],
        [(0, [Step(Op.REPLACE, write=5, a=0.5)]), (1, [line]), (2, [plain])],
        [(0, [Step(Op.SCALE, a=1.5, mask=11)]), (1, [Step(Op.SCALE, a=0.0)])],
        [(1, [Step(Op.GATE, read=1, b=1e9, flags=_FIRST | Flags.STEP), gated])],
        [(1, [Step(Op.GATE, read=1, b=-1e9, flags=_FIRST | Flags.STEP), gated]), (0, [other])],
        [(0, [replace(plain, ids=_EVERY_ID, flags=_BOTH | Flags.OTHER_IDS)]), (1, [other])],
        [(0, [replace(plain, ids=(0, 2, 4))]), (1, [line])],
        [(0, [replace(plain, a=0.0)]), (2, [replace(other, a=1e9)])],
    ]


def dose_case(
    *, rows: int = 40, width: int = 80, dtype: torch.dtype, residual: bool
) -> tuple[Case, list[Edits]]:
    """Rows that run each program in turn, and the programs."""
    every = programs(width)
    made = case(
        [_with_slots(edits) for edits in every], rows=rows, width=width, dtype=dtype,
        residual=residual, captures=False, seed=width,
    )  # fmt: skip
    doses = torch.zeros(made.tally.shape[0], COLUMNS, dtype=torch.int32)
    made.tally = torch.cat((made.tally, doses), 1)
    return made, every


def _with_slots(edits: Edits) -> list[Step]:
    steps = []
    for column, edit in edits:
        *before, last = edit
        steps += [*before, last if column is None else replace(last, slot=column)]
    return steps


def wanted_doses(made: Case, every: list[Edits]) -> NDArray[np.float64]:
    """The dose of each row and column, NaN where there is none: of the rows that programs of ever
    more of the edits make of the stream in float32, by the op's definition.
    """
    rows, width = made.hidden.shape
    stream = made.hidden.float() + (0 if made.residual is None else made.residual.float())
    doses = np.full((made.tally.shape[0], COLUMNS), np.nan)
    for row in range(rows):
        edits = every[row % len(every)]
        before = stream[row]
        for number, (column, _) in enumerate(edits, 1):
            plain = case(
                [_with_slots([(None, edit) for _, edit in edits[:number]])], rows=1, width=width,
                residual=False, captures=False,
            )  # fmt: skip
            plain.bank, plain.ids = made.bank, made.ids[row : row + 1]
            plain.tokens[0, layout.POSITION] = made.tokens[row, layout.POSITION]
            plain.hidden = stream[row : row + 1].clone()
            done = expected(plain)
            after = done.hidden[0]
            counted = int(done.tally[0, layout.EDITS] - plain.tally[0, layout.EDITS])
            applied = counted > (int(done_before(plain, edits[: number - 1])) if number > 1 else 0)
            if column is not None and applied:
                change = (after.double() - before.double()).norm()
                doses[row, column] = float(change / before.double().norm())
            before = after
    return doses


def done_before(plain: Case, edits: Edits) -> int:
    """How many edits of some count for the row of a case."""
    made = case(
        [_with_slots([(None, edit) for _, edit in edits])], rows=1, width=plain.hidden.shape[1],
        residual=False, captures=False,
    )  # fmt: skip
    made.bank, made.ids, made.hidden = plain.bank, plain.ids, plain.hidden.clone()
    return int(expected(made).tally[0, layout.EDITS] - made.tally[0, layout.EDITS])


def doses_in(made: Case) -> NDArray[np.float64]:
    """The doses that the op left in a tally, NaN where there is none."""
    bits = made.tally[:, layout.DOSES :].cpu().numpy()
    doses = np.where(bits == layout.NO_CHANGE, np.float32(0), bits.view(np.float32))
    return np.where(bits == 0, np.nan, doses.astype(np.float64))


def assert_doses(made: Case, wanted: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(doses_in(made), wanted, rtol=2e-4, atol=1e-6)
