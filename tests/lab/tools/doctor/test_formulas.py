"""The doctor's formulas against the tests' own, of every operation that it tries."""

import numpy as np
import pytest
import torch
from support import formulas as oracle

from midstream import Probe
from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.cases import OPERATIONS, _Maker

TAP = ("resid_mid", 1)


@pytest.fixture
def rows():
    return torch.randn(13, 24, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_what_the_other_formulas_make_of_it(name, rows):
    made = OPERATIONS[name](_Maker(TAP, rows, 2))
    if isinstance(made, Probe):
        expected = oracle.read_score(made, rows.numpy())
        assert np.allclose(formulas.score(made, rows), expected, atol=1e-12)
        return
    found = formulas.apply(made, rows).numpy()
    assert np.allclose(found, oracle.apply(made, rows.numpy()), atol=1e-5)
    # What would not move the rows would show nothing.
    assert np.linalg.norm(found - rows.numpy()) > 0.1 * float(rows.norm())


@pytest.mark.parametrize("name", ["Clamp", "Gate", "Feature"])
def test_those_that_depend_on_what_is_there_do_not_do_the_same_to_every_token(name, rows):
    made = OPERATIONS[name](_Maker(TAP, rows, 2))
    added = formulas.apply(made, rows) - rows
    assert (added - added[0]).norm() > 0.1 * added.norm()
