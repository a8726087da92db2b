"""The doses of edits that the op leaves in the tally."""

import numpy as np
import pytest
import torch
from support.dose_cases import assert_doses, dose_case, doses_in, wanted_doses
from support.site_cases import Step, case, same_bits

from midstream.ops import layout
from midstream.ops.layout import Op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [True, False])
def test_a_dose_is_how_long_an_edits_change_is_relative_to_the_row_before_it(dtype, residual):
    made, programs = dose_case(dtype=dtype, residual=residual)
    wanted = wanted_doses(made, programs)
    made.run()
    assert_doses(made, wanted)
    assert np.isfinite(wanted).sum() > 50
    assert (wanted == 0).any()  # of a closed gate


@pytest.mark.parametrize("residual", [True, False])
def test_doses_are_the_same_where_all_rows_have_one_program(residual):
    """Rows that all get the same additions are changed at once."""
    made, programs = dose_case(rows=3, dtype=torch.float32, residual=residual)
    for number, program in enumerate(programs, layout.FIRST_FREE_PROGRAM):
        only = made.copy()
        only.tokens[:3, layout.PROGRAM] = number
        wanted = wanted_doses(only, [program])
        only.run()
        assert_doses(only, wanted)


def test_the_dose_of_an_addition_is_the_scale_times_the_vectors_length_by_the_rows():
    for others in ([], [Step(Op.LINEAR, read=3, write=3, a=-0.1)]):
        step = Step(Op.ADD, write=1, a=-3.0, slot=1)
        made = case([[step, *others]], rows=6, width=40, captures=False)
        made.tally = torch.cat((made.tally, torch.zeros(9, 2, dtype=torch.int32)), 1)
        stream = made.hidden + made.residual
        made.run()
        wanted = 3 * made.bank[1].norm() / stream.norm(dim=1)
        np.testing.assert_allclose(doses_in(made)[:6, 1], wanted.numpy(), rtol=1e-5)
        assert np.isnan(doses_in(made)[:, 0]).all()


def test_the_dose_of_a_row_of_zeros_is_infinite_unless_nothing_changes():
    steps = [Step(Op.ADD, write=1, a=0.0, slot=0), Step(Op.ADD, write=1, a=1.0, slot=1)]
    made = case([steps], rows=2, width=40, captures=False)
    made.tally = torch.cat((made.tally, torch.zeros(5, 2, dtype=torch.int32)), 1)
    made.hidden[:], made.residual[:] = 0, 0
    made.run()
    assert doses_in(made)[:2].tolist() == [[0.0, np.inf]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_to_the_last_bit_with_doses_and_without(dtype):
    made, _ = dose_case(dtype=dtype, residual=True)
    plain = made.copy()
    plain.instructions[plain.instructions[:, 0] < Op.GATE, 3] = 0
    made.run()
    plain.run()
    assert same_bits(made.hidden, plain.hidden)
    assert same_bits(made.residual, plain.residual)
    assert torch.equal(made.tally[:, :4], plain.tally[:, :4])
    assert np.isnan(doses_in(plain)).all()
