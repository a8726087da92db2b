"""Doses of edits, measured by the Triton kernel."""

import pytest
import torch
from support.dose_cases import assert_doses, dose_case, wanted_doses
from support.site_cases import same_bits

from midstream.ops.layout import Op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 576, 4096])
@pytest.mark.parametrize("residual", [True, False])
def test_the_kernel_measures_doses_as_the_formula_says(dtype, width, residual):
    made, programs = dose_case(rows=26, width=width, dtype=dtype, residual=residual)
    wanted = wanted_doses(made, programs)
    found = made.copy("cuda")
    found.run()
    assert_doses(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [13, 2000])
def test_rows_are_the_same_to_the_last_bit_with_doses_and_without(dtype, rows):
    made, _ = dose_case(rows=rows, width=4096, dtype=dtype, residual=True)
    plain = made.copy()
    plain.instructions[plain.instructions[:, 0] < Op.GATE, 3] = 0
    made, plain = made.copy("cuda"), plain.copy("cuda")
    made.run()
    plain.run()
    assert same_bits(made.hidden, plain.hidden)
    assert same_bits(made.residual, plain.residual)
    assert torch.equal(made.tally[:, :4], plain.tally[:, :4])


def test_a_kernel_that_is_launched_again_measures_the_new_rows():
    made, programs = dose_case(rows=26, width=576, dtype=torch.bfloat16, residual=True)
    found = made.copy("cuda")
    found.run()
    for _ in range(2):
        made.hidden = made.hidden.roll(1, 0)
        wanted = wanted_doses(made, programs)
        found.hidden, found.residual = made.hidden.cuda(), made.residual.cuda()
        found.tally[:, 4:] = 0
        found.run()
        assert_doses(found, wanted)
