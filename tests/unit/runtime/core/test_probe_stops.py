"""Probes that end their request: from the worker's scores to the outputs of the engine core."""

from __future__ import annotations

import pytest
from support.nightly import rounds
from support.stopping import StoppingRun

CASES = 25  # of one test


@pytest.mark.parametrize("part", range(rounds(suite=3, nightly=400)))
def test_no_output_has_a_token_beyond_the_one_that_met_the_condition(part):
    ended = 0
    for seed in range(part * CASES, (part + 1) * CASES):
        run = StoppingRun(seed)
        run.run()
        ended += run.check()
    assert ended > CASES / 4
