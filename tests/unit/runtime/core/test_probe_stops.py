"""Probes that end their request or switch its edits: from the worker's scores to the outputs of the
engine core, and back to the worker.
"""

import pytest
from support.nightly import rounds
from unit.runtime.core.stopping import StoppingRun

CASES = 25  # of one test


@pytest.mark.parametrize("part", range(rounds(suite=2, nightly=400)))
def test_no_output_has_a_token_beyond_the_one_that_met_the_condition(part):
    """And each position is computed under the version of the plan that held there."""
    ended = switched = 0
    for seed in range(part * CASES, (part + 1) * CASES):
        run = StoppingRun(seed)
        run.run()
        found = run.check()
        ended, switched = ended + found[0], switched + found[1]
    assert ended > CASES / 8
    assert switched > CASES / 8
