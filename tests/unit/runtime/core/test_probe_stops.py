"""Probes that end their request or switch its edits: from the worker's scores to the outputs of the
engine core, and back to the worker.
"""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import rounds
from unit.runtime.core.stopping import StoppingRun

from midstream.plan.control.act import Condition, Progress
from midstream.plan.positions.position_set import Where
from midstream.runtime.core.probe_stops import ProbeProgress, advance
from midstream.runtime.protocol.acting_probes import ActingProbe
from midstream.runtime.protocol.step_scores import ScoresOfStep

CASES = 25  # of one test


@pytest.mark.parametrize("part", range(rounds(suite=1, nightly=400)))
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


@pytest.mark.parametrize("seed", [247, 757, 955, 983])
def test_a_token_that_is_computed_again_after_it_switched_keeps_its_version(seed):
    """Each of these runs has a switch by a step that a preemption overtook."""
    run = StoppingRun(seed)
    run.run()
    run.check()


@given(st.integers(0, 10**9))
def test_many_scores_at_once_meet_a_condition_where_each_alone_does(seed: int) -> None:
    draw = random.Random(seed)
    size, cut = draw.randrange(40, 90), draw.randrange(1, 30)
    values = np.array([draw.choice([0.1, 0.5, 1.0, 2.0, math.nan, math.inf]) for _ in range(size)])
    values[: draw.randrange(size)] = 0.0
    column = values.astype(np.float32)[:, None]
    bound = draw.choice([0.1, float(np.float32(0.1)), 0.5, 1.5])
    side = draw.choice(["above", "below"])
    condition = Condition(
        **{side: bound if side == "above" else -bound}, for_=draw.choice([1, 1, 3])
    )
    if side == "below":
        column = -column
    probe = ActingProbe("p", 0, Where(((draw.randrange(9), None),)), condition)

    def advanced(pieces: list[tuple[int, int]]) -> Any:
        progress, firing = ProbeProgress(0, (Progress(),)), None
        for start, stop in pieces:
            scores = ScoresOfStep(["r"], [start], [0], [stop - start], column[start:stop])
            if firing is None:
                progress, firing, _ = advance([probe], progress, scores, 0, size, lambda _: 0)
        return firing, progress.each[0].run

    together = advanced([(0, cut), (cut, size)])
    assert together == advanced([(position, position + 1) for position in range(size)])


def test_a_score_that_single_precision_cannot_tell_from_the_bound_meets_it_among_many() -> None:
    column = np.zeros((40, 1), np.float32)
    column[30] = 0.1  # a little more than 0.1 in double precision
    scores = ScoresOfStep(["r"], [0], [0], [40], column)
    probe = ActingProbe("p", 0, Where(((0, None),)), Condition(above=0.1))
    _, firing, _ = advance([probe], ProbeProgress(0, (Progress(),)), scores, 0, 40, lambda _: 0)
    assert firing is not None
    assert firing.position == 30


def test_positions_that_were_read_before_have_no_scores_whichever_rows_come_first() -> None:
    """A preempted request computes some again: what is new ends before it begins."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    scores = ScoresOfStep(["r"], [7], [0], [2], values)  # positions 7 and 8 are rows 0 and 1
    nothing = range(8, 3)  # as rows: from 1 to the fourth from the end
    assert scores.at(0, 0, nothing) == []
    assert scores.numbers(0, range(2), nothing).shape == (0, 2)
    assert scores.numbers(0, range(2), range(8, 9)).tolist() == [[2.0, 3.0]]
