"""What edits leave behind whose contributions cancel, and vectors that an edit makes zero."""

import pytest
import torch
from support.site_cases import Case, Step, case, same_bits

import midstream.ops.site  # noqa: F401  (defines the op)
from midstream.ops.layout import Flags, Op

KEEP = Flags.FRESH | Flags.COUNTED | Flags.KEEP
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def additions(*amounts: tuple[int, float]) -> list[Step]:
    """Instructions that add rows of the bank, each times a factor."""
    return [Step(Op.ADD, write=row, a=factor) for row, factor in amounts]


def made_of(steps: list[Step], dtype: torch.dtype) -> Case:
    return case([steps], rows=6, width=16, dtype=dtype, captures=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_that_are_each_taken_back_at_once_leave_every_bit(dtype):
    made = made_of(additions((1, 0.3), (1, -0.3), (2, 4.0), (2, -4.0)), dtype)
    before = made.hidden.clone()
    made.run()
    assert same_bits(made.hidden, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_that_are_taken_back_later_leave_a_rounding_error_of_float32(dtype):
    """As docs/operations.md says: sums are rounded, and (v + w) − v is not always w."""
    made = made_of(additions((1, 0.3), (2, 0.7), (1, -0.3), (2, -0.7)), dtype)
    before = (made.hidden.float() + made.residual.float()).clone()
    size = (made.bank[1].abs() * 0.3 + made.bank[2].abs() * 0.7).max()
    made.run()
    left = (made.hidden.float() + made.residual.float() - before).abs().max()
    rounding = 2 * float(torch.finfo(dtype).eps) * float(before.abs().max() + 1)
    assert left <= 4 * 2**-24 * size + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.ADD, Op.REPLACE])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_vector_that_an_edit_makes_zero_has_no_direction_and_stays_zero(dtype, op, is_masked):
    """One rule for every edit with norm="keep": the sum of a Steer, the row of a Replace."""
    mask = 9 if is_masked else None
    programs = [[Step(op, write=row, a=1.0, flags=KEEP, mask=mask)] for row in range(4)]
    made = case(programs, rows=4, width=16, dtype=dtype, residual=False, captures=False)
    made.bank[9] = (torch.arange(16) < 5).float()
    before = made.hidden.clone()
    for row in range(4):
        made.bank[row] = -before[row].float() if op is Op.ADD else 0.0
    made.run()
    chosen = made.bank[9] != 0 if is_masked else torch.ones(16, dtype=torch.bool)
    assert not made.hidden[:, chosen].any()
    assert same_bits(made.hidden[:, ~chosen].contiguous(), before[:, ~chosen].contiguous())
    assert made.hidden.isfinite().all()
