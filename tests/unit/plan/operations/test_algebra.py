"""What must hold between operations, seen through their instructions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.formulas import run
from unit.plan.strategies import directions, numbers, plain_edits, subspaces

from midstream.plan import (
    Ablate,
    Affine,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Reading,
    Replace,
    Scale,
    Steer,
)

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


def test_each_component_has_its_factor_and_its_shift():
    h, factor, shift = np.array([[1.0, 2.0, -3.0, 4.0]]), [2, 0, 1, -0.5], [0, 1, -1, 8]
    assert do(h, Scale(factor, 0)).tolist() == [[2, 0, -3, -2]]
    assert do(h, Scale(factor, 0, shift=shift)).tolist() == [[2, 1, -4, 6]]
    assert do(h, Scale(3, 0, shift=shift)).tolist() == [[3, 7, -10, 20]]
    assert do(h, Scale(factor, 0, shift=shift, dims=[1, 3])).tolist() == [[1, 1, -3, 6]]


@given(plain_edits(WIDTH).filter(lambda edit: len(edit.own().get("rows", "1")) == 1), hidden)
def test_a_closed_gate_changes_nothing(edit, h):
    shut = Gate(edit, Reading([0.0] * WIDTH, bias=1), threshold=2)
    assert np.allclose(do(h, shut), h, rtol=1e-12, atol=0)
    assert shut.edit.op != "steer" or shut.edit.norm == "keep" or (do(h, shut) == h).all()


@given(plain_edits(WIDTH).filter(lambda edit: len(edit.own().get("rows", "1")) == 1), hidden)
def test_an_open_gate_is_its_edit(edit, h):
    for wide_open in (
        Gate(edit, Reading([0.0] * WIDTH, bias=1)),
        Gate(edit, Reading([0.0] * WIDTH, bias=1), sharpness=1e6),
    ):
        assert np.array_equal(do(h, wide_open), do(h, edit))


@given(vectors, hidden)
def test_a_gate_fires_above_its_threshold_and_not_at_it(v, h):
    edit = Steer(v, 0)
    at = Gate(edit, Reading([0.0] * WIDTH, bias=2), threshold=2)
    assert (do(h, at) == h).all()
    half = Gate(edit, Reading([0.0] * WIDTH, bias=2), threshold=2, sharpness=5)
    assert np.allclose(do(h, half), do(h, Steer(v, 0, scale=0.5)), atol=1e-6)


@given(vectors, hidden, st.integers(-64, 64))
def test_adding_and_taking_away_is_nothing(v, h, eighth):
    assert (do(h, Steer(v, 0, scale=eighth / 8), Steer(v, 0, scale=-eighth / 8)) == h).all()


@given(subspaces(WIDTH), hidden)
def test_ablating_twice_is_ablating_once(rows, h):
    once = do(h, Ablate(rows, 0))
    assert np.allclose(do(once, Ablate(rows, 0)), once, atol=1e-5)
    assert np.allclose(once @ np.array(rows).T, 0, atol=1e-4)
    assert np.allclose(
        do(h, Ablate(rows, 0, strength=2), Ablate(rows, 0, strength=2)), h, atol=1e-4
    )


@given(subspaces(WIDTH), hidden, st.randoms(use_true_random=False))
def test_a_subspace_does_not_depend_on_its_basis(rows, h, random):
    mixed = [[sum(column) for column in zip(*rows, strict=True)], *rows[1:]]
    random.shuffle(mixed)
    scaled = [[8 * number for number in row] for row in mixed]
    assert np.allclose(do(h, Ablate(scaled, 0)), do(h, Ablate(rows, 0)), atol=1e-4)


@given(vectors, hidden, st.integers(-20, 20))
def test_a_clamped_coordinate_is_where_it_was_put_and_the_rest_is_untouched(v, h, value):
    u = v.numpy().astype(float) / v.norm
    found = do(h, Clamp(v, 0, value))
    assert np.allclose(found @ u, value, atol=1e-4)
    rest = np.eye(WIDTH) - np.outer(u, u)
    assert np.allclose(found @ rest, h @ rest, atol=1e-4)
    assert np.allclose(do(found, Clamp(v, 0, value)), found, atol=1e-4)
    assert np.allclose(do(h, Clamp(v, 0, 0)), do(h, Ablate(v, 0)), atol=1e-5)


@given(vectors, hidden, st.integers(-64, 64))
def test_norms_are_matched_and_kept(v, h, eighth):
    scale = eighth / 8
    moved = do(h, Steer(v, 0, scale=scale, norm="match")) - h
    assert np.allclose(np.linalg.norm(moved), abs(scale) * np.linalg.norm(h), rtol=1e-5, atol=1e-9)
    kept = do(h, Steer(v, 0, scale=scale, norm="keep"))
    summed = h + scale * v.numpy()
    if np.linalg.norm(summed) > 1e-6:
        assert np.allclose(np.linalg.norm(kept), np.linalg.norm(h), rtol=1e-6)
        assert np.allclose(kept * np.linalg.norm(summed), summed * np.linalg.norm(h), atol=1e-3)


def test_where_the_sum_is_nothing_there_is_no_norm_to_keep():
    assert (do(np.array([[1.0, 0, 0, 0]]), Steer([-1, 0, 0, 0], 0, norm="keep")) == 0).all()


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_a_matched_vectors_own_length_does_not_matter(size):
    h = np.array([[0.0, 3.0, 4.0, 0.0]])
    found = do(h, Steer([size, 0, 0, 0], 0, scale=2, norm="match"))
    assert np.allclose(found, [[10, 3, 4, 0]])


@given(hidden)
def test_replacing_a_vector_by_itself_is_nothing(h):
    assert (do(h, Replace(h[0], 0)) == h).all()
    assert np.allclose(do(h, Replace(h[0], 0, alpha=0.3)), h)


@given(vectors, hidden)
def test_replacing_twice_is_the_last(v, h):
    assert np.allclose(do(h, Replace([9.0] * WIDTH, 0), Replace(v, 0)), [v.numpy()])


def test_the_kth_token_gets_the_kth_row():
    rows = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
    h = np.zeros((3, WIDTH))
    assert (do(h, Replace(rows, 0)) == rows).all()
    (step,) = Replace(rows, 0).instructions(WIDTH)
    assert (run([step], h[:2], positions=[2, 0]) == [rows[2], rows[0]]).all()


@pytest.mark.parametrize("norm", [None, "match", "keep"])
def test_steering_by_a_row_per_token_is_steering_each_token_by_its_row(norm):
    rows = [[1, 0, 2, 1], [0, 0, 0, 0], [3, 1, -3, 0]]
    h = np.array([[1.0, 2, 3, 4], [4, 3, 2, 1], [0, 1, 0, 1]])
    found = do(h, Steer(rows=rows, layer=0, scale=1.5, norm=norm))
    for nth, row in enumerate(rows):
        alone = do(h[nth : nth + 1], Steer(row, 0, 1.5, norm=norm)) if any(row) else h[nth]
        assert np.allclose(found[nth], alone)
    (step,) = Steer(rows=rows, layer=0, norm=norm).instructions(WIDTH)
    moved = run([step], h[:2], positions=[2, 0])
    assert np.allclose(moved[1], do(h[1:2], Steer(rows[0], 0, norm=norm)))


@given(vectors, hidden)
def test_an_edit_that_keeps_the_norm_keeps_the_direction_of_what_it_would_have_made(v, h):
    for edit in (Ablate(v, 0, strength=0.5), Clamp(v, 0, value=2), Replace(v, 0, alpha=0.3)):
        bare, kept = do(h, edit), do(h, edit.replace(norm="keep"))
        assert np.allclose(np.linalg.norm(kept, axis=1), np.linalg.norm(h, axis=1), rtol=1e-5)
        lengths = np.linalg.norm(bare, axis=1, keepdims=True)
        assume((lengths > 1e-3).all())
        wanted = bare / lengths * np.linalg.norm(h, axis=1, keepdims=True)
        assert np.allclose(kept, wanted, rtol=1e-4, atol=1e-4)


def test_one_row_is_a_vector():
    assert Steer(rows=[[1, 2, 3, 4]], layer=0) == Steer([1, 2, 3, 4], 0)


@given(vectors, vectors, hidden)
def test_additions_commute(v, w, h):
    edits = [Steer(v, 0, scale=2), Steer(w, 0)]
    assert np.allclose(do(h, *edits), do(h, *edits[::-1]))


def test_order_matters_where_it_should():
    h = np.array([[1.0, 2, 3, 4]])
    steer, ablate = Steer([1, 1, 0, 0], 0), Ablate([1, 0, 0, 0], 0)
    for first, second in [
        (steer, ablate),
        (steer, Scale(2, 0)),
        (steer, Clamp([1, 0, 0, 0], 0, high=1.5)),
        (steer, Replace([1, 1, 1, 1], 0)),
        (steer, Gate(steer, Reading([1, 0, 0, 0]), threshold=1.5)),
        (ablate, Ablate([1, 1, 0, 0], 0)),
        (steer, Feature([1, 0, 0, 0], [0, 0, 1, 0], 0, value=5)),
    ]:
        assert not np.allclose(do(h, first, second), do(h, second, first)), second
    across = Steer([0, 1, 0, 0], 0)
    assert np.allclose(do(h, across, ablate), do(h, ablate, across))


def test_all_terms_of_one_edit_read_the_same_vector():
    # The first term writes what the second one reads.
    edit = Affine([[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], 0)
    assert (do(np.array([[1.0, 0, 0, 0]]), edit) == [[1, 1, 0, 0]]).all()


@given(vectors, hidden)
def test_an_affine_map_can_ablate_and_steer(v, h):
    u = v.numpy().astype(float) / v.norm
    assert np.allclose(do(h, Affine(u, u, 0, scale=-1)), do(h, Ablate(v, 0)), atol=1e-5)
    zero = [0.0] * WIDTH
    assert np.allclose(do(h, Affine(zero, v, 0, bias=1, scale=2)), do(h, Steer(v, 0, 2)))


@given(subspaces(WIDTH), hidden)
def test_reft_puts_the_learned_value_into_the_subspace(rows, h):
    r = np.linalg.qr(np.array(rows).T)[0].T
    w, b = np.arange(r.size).reshape(r.shape) / 4, np.arange(len(r)) / 2
    found = do(h, LoReFT(r, w, b, 0))
    assert np.allclose(found @ r.T, h @ w.T + b, atol=1e-4)
    outside = np.eye(WIDTH) - r.T @ r
    assert np.allclose(found @ outside, h @ outside, atol=1e-4)


def test_an_added_feature_is_a_steering_vector():
    feature = Feature([1, 0, 0, 0], [0, 1, 0, 0], 0, mode="add", value=3)
    assert feature.instructions(WIDTH) == Steer([0, 1, 0, 0], 0, 3).instructions(WIDTH)
