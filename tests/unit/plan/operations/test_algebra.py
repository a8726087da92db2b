"""What holds of operations that no formula of theirs says, seen through their instructions."""

import numpy as np
from hypothesis import given
from support.formulas import run
from unit.plan.strategies import directions, numbers

from midstream.plan import Ablate, Affine, Clamp, Feature, Gate, Reading, Replace, Scale, Steer

WIDTH = 4
vectors = directions(WIDTH)
hidden = numbers(WIDTH).map(lambda row: np.array([row]))


def do(h, *edits):
    for edit in edits:
        h = run(edit.instructions(WIDTH), h)
    return h


@given(vectors, hidden)
def test_what_changes_nothing_changes_no_bit(v, h):
    rows = [v.numpy().tolist()]
    for edit in (
        Steer(v, 0, scale=0),
        Steer(v, 0, scale=0, norm="match"),
        Ablate(v, 0, strength=0),
        Clamp(v, 0, low=-1e30, high=1e30),
        Clamp(v, 0, low=-1e30),
        Clamp(v, 0, value=3, strength=0),
        Feature(v, v, 0, mode="scale", value=1),
        Feature(v, v, 0, mode="add", value=0),
        Feature(v, v, 0, mode="ablate", threshold=1e30),
        Affine(rows, rows, 0, bias=3, scale=0),
        Replace(v, 0, alpha=0),
        Scale(1, 0),
        Scale([1] * WIDTH, 0, shift=[0] * WIDTH),
    ):
        assert (do(h, edit) == h).all(), edit


@given(vectors, hidden)
def test_a_gate_fires_above_its_threshold_and_not_at_it(v, h):
    edit = Steer(v, 0)
    at = Gate(edit, Reading([0.0] * WIDTH, bias=2), threshold=2)
    assert (do(h, at) == h).all()
    half = Gate(edit, Reading([0.0] * WIDTH, bias=2), threshold=2, sharpness=5)
    assert np.allclose(do(h, half), do(h, Steer(v, 0, scale=0.5)), atol=1e-6)


def test_where_the_sum_is_nothing_there_is_no_norm_to_keep():
    assert (do(np.array([[1.0, 0, 0, 0]]), Steer([-1, 0, 0, 0], 0, norm="keep")) == 0).all()


def test_a_matched_vectors_own_length_does_not_matter():
    for size in (1e-40, 1e-30, 1e30):
        steer = Steer([size, 0, 0, 0], 0, scale=2, norm="match")
        assert np.allclose(do(np.array([[0.0, 3.0, 4.0, 0.0]]), steer), [[10, 3, 4, 0]])


def test_the_kth_token_gets_the_kth_row():
    rows = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
    h = np.zeros((3, WIDTH))
    assert (do(h, Replace(rows, 0)) == rows).all()
    (step,) = Replace(rows, 0).instructions(WIDTH)
    assert (run([step], h[:2], positions=[2, 0]) == [rows[2], rows[0]]).all()


def test_all_terms_of_one_edit_read_the_same_vector():
    # The first term writes what the second one reads.
    edit = Affine([[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], 0)
    assert (do(np.array([[1.0, 0, 0, 0]]), edit) == [[1, 1, 0, 0]]).all()
