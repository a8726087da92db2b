"""Scores with state: the reference against a loop over all tokens of a request."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gate_memory import KEPT, SLOTS, check_steps, random_steps

from midstream.ops import layout
from midstream.ops.scan.reference import scan_ref


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_scores_are_those_of_a_loop_over_the_tokens_however_the_steps_are_cut(seed):
    """Chunks, draft tokens that are rejected, preemption, ids, gaps, several gates of a request."""
    check_steps(scan_ref, seed)


def test_many_scores_of_all_kinds_are_compared():
    assert sum(check_steps(scan_ref, seed, torch.bfloat16) for seed in range(6)) > 300


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_reading_that_is_not_finite_is_flagged_at_its_row_and_the_gate_is_not_open_by_nan(bad):
    for arguments, wanted in random_steps(3, steps=1):
        hidden, tally, scans = arguments[0], arguments[4], arguments[11]
        row = min(row for row, _ in wanted)
        hidden[row] = bad
        scan_ref(*arguments)
        flagged = tally[:, layout.NONFINITE].nonzero().flatten().tolist()
        assert flagged == [row]
        assert int(scans[:, layout.SCAN_COUNT].sum())


def test_states_of_requests_without_rows_are_left_alone():
    for arguments, _ in random_steps(5, steps=2):
        arguments[11].zero_()
        arguments[12].copy_(torch.arange(6 * KEPT * 3).view(6, KEPT, 3))
        before = arguments[12].clone()
        scan_ref(*arguments)
        assert torch.equal(arguments[12], before)
        assert bool((arguments[10] == -9.0).all())
        assert arguments[10].shape[1] == SLOTS + 2 * len(before)
