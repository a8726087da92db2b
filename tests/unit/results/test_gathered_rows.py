"""Rows of a completion in the blocks that the workers sent."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from midstream.codecs import Raw
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.gathered_rows import GatheredRows, RowGroup, numbers_of

FIRST, SECOND, THIRD = ("resid_post", 0), ("resid_post", 1), ("resid_post", 2)


def group(taps, positions, values):
    """Return values [rows, taps, width] as a group with one block."""
    block = SimpleNamespace(taps=taps, chunks=[values.view(torch.uint8)], is_leased=False)
    nothing = Rows(Raw(), values.shape[2], values.dtype, (), ())
    return RowGroup(taps, positions, [block], None, nothing)


@pytest.fixture
def gathered():
    """Two groups, whose taps are shown in another order than they are in."""
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    first = group((FIRST, THIRD), np.array([3, 5]), values[:, :2].clone())
    second = group((SECOND,), np.array([7, 8]), values[:, 2:].clone())
    return GatheredRows([FIRST, SECOND, THIRD], [first, second])


def test_positions_and_counts_are_those_of_each_taps_group(gathered):
    positions = gathered.positions()
    assert {tap: there.tolist() for tap, there in positions.items()} == {
        FIRST: [3, 5],
        SECOND: [7, 8],
        THIRD: [3, 5],
    }
    assert list(positions) == list(gathered) == [FIRST, SECOND, THIRD]
    assert gathered.counts() == {FIRST: 2, SECOND: 2, THIRD: 2}
    assert positions[FIRST] is positions[THIRD]


def test_whoever_changes_positions_does_not_change_those_of_other_completions():
    shared, values = np.array([3, 5]), torch.zeros(2, 1, 4)
    mine, other = (group((FIRST,), shared, values) for _ in range(2))
    mine.positions[0] = -1
    assert mine.positions.tolist() == [-1, 5]
    assert other.positions.tolist() == shared.tolist() == [3, 5]


def test_numbers_that_completions_share_are_those_of_their_groups(gathered):
    numbers = numbers_of(gathered, gathered.groups)
    shared = GatheredRows(gathered, gathered.groups, numbers)
    assert numbers == {FIRST: 0, SECOND: 1, THIRD: 0}
    for tap in gathered:
        assert shared.group(tap) is gathered.group(tap)
        assert torch.equal(shared[tap].decoded(), gathered[tap].decoded())


def test_a_pickle_has_the_positions_and_no_other_rows(gathered):
    rows = Activations(gathered, gathered.positions(), range(9))
    held = rows.__getstate__()["held"]
    assert type(held.positions) is type(held.values) is dict
    found = pickle.loads(pickle.dumps(rows))
    for tap in gathered:
        assert torch.equal(found[tap], rows[tap])
        assert torch.equal(found.positions_of(*tap), rows.positions_of(*tap))
