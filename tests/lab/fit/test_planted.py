"""Directions and their scores, on rows whose direction is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.lab.fit import Directions
from midstream.lab.fit.folds import Folds
from midstream.lab.fit.text_scores import TextScore

PAIRS, LAYERS, HIDDEN = 40, 3, 48
METHODS = ["mean", "pca", "lat", "logistic", "lda"]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(strength: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two classes `[PAIRS, LAYERS, HIDDEN]` that differ along an axis at layer 1 alone.

    The halves of a pair share a topic, which is larger than the difference.
    """
    topic = 3 * random(seed, PAIRS, LAYERS, HIDDEN)
    axis = torch.nn.functional.normalize(random(seed + 1, HIDDEN), dim=0)
    rows = [topic + random(seed + 2 + i, PAIRS, LAYERS, HIDDEN) for i in range(2)]
    rows[0][:, 1] += strength * axis
    return rows[0], rows[1], axis


@pytest.mark.parametrize("method", ["mean", "lat", "logistic", "lda"])
def test_every_method_recovers_a_planted_direction_and_its_layer(method: str) -> None:
    positive, negative, axis = planted(60.0)
    found = Directions.from_rows(positive, negative, method)
    assert found.best_layer == 1
    # Weights of classifiers also undo what the components have in common.
    assert np.dot(found[1].unit, axis.numpy()) > (0.97 if method in ("mean", "lat") else 0.7)
    assert found.scores[1].auc == 1.0
    assert found.scores[1].accuracy == 1.0
    assert found.scores[1].d_prime > 5
    assert found.num_folds == 5


def test_the_mean_direction_is_the_difference_of_the_means_of_all_rows() -> None:
    positive, negative, _ = planted(5.0)
    found = Directions.from_rows(positive, negative)
    np.testing.assert_allclose(found.vectors, positive.mean(0) - negative.mean(0), atol=1e-6)
    np.testing.assert_allclose(
        found.midpoints, (positive.mean(0) + negative.mean(0)) / 2, atol=1e-6
    )


def test_random_labels_score_as_chance() -> None:
    scores = []
    for seed in range(20):
        positive, negative, _ = planted(0.0, seed=100 * seed)
        scores += Directions.from_rows(positive, negative, seed=seed).scores.values()
    assert sum(score.auc for score in scores) / len(scores) == pytest.approx(0.5, abs=0.05)
    assert sum(score.accuracy for score in scores) / len(scores) == pytest.approx(0.5, abs=0.05)
    assert abs(sum(score.d_prime for score in scores) / len(scores)) < 0.2


def test_scoring_without_holding_out_would_have_looked_better() -> None:
    positive, negative, _ = planted(0.0)
    found = Directions.from_rows(positive, negative)
    seen = [found.project(x.transpose(0, 1)) for x in (positive, negative)]
    cheating = (seen[0] > 0).mean() / 2 + (seen[1] < 0).mean() / 2
    assert cheating > 0.58
    assert max(score.accuracy for score in found.scores.values()) < cheating


@pytest.mark.parametrize("method", METHODS)
def test_class_means_project_to_one_and_minus_one_and_a_scale_of_one_joins_them(
    method: str,
) -> None:
    positive, negative, _ = planted(4.0)
    found = Directions.from_rows(positive, negative, method)
    means = np.stack([positive.mean(0), negative.mean(0)], axis=1)
    wanted = np.tile([1.0, -1.0], (LAYERS, 1))
    np.testing.assert_allclose(found.project(means), wanted, atol=1e-4)
    for layer, one in enumerate(found):
        apart = (means[layer, 0] - means[layer, 1]) @ one.unit
        assert one.gap == pytest.approx(apart, rel=1e-5)
        assert apart > 0
        steer = one.steer(1.0)
        np.testing.assert_array_equal(steer.vector.numpy(), one.vector)
        probe = one.probe()
        scores = means[layer].astype("f8") @ probe.direction.numpy().astype("f8") + probe.bias
        np.testing.assert_allclose(scores, wanted[layer], atol=1e-4)
    if method == "mean":
        np.testing.assert_allclose(found.cosine(means), wanted, atol=1e-4)


def test_adding_the_direction_once_moves_the_projection_by_two() -> None:
    positive, negative, _ = planted(4.0)
    found = Directions.from_rows(positive, negative)
    rows = random(9, LAYERS, 5, HIDDEN)
    moved = found.project(rows + torch.tensor(found.vectors)[:, None]) - found.project(rows)
    np.testing.assert_allclose(moved, 2.0, atol=1e-3)


def test_bfloat16_rows_are_fitted_as_the_numbers_that_they_are() -> None:
    positive, negative, _ = planted(30.0)
    halves = positive.bfloat16(), negative.bfloat16()
    found = Directions.from_rows(*halves)
    same = Directions.from_rows(*(half.double() for half in halves))
    np.testing.assert_array_equal(found.vectors, same.vectors)
    assert found.vectors.dtype == np.float32


def test_classes_that_coincide_give_zeros_and_no_probe() -> None:
    rows = random(0, 8, 2, 4)
    found = Directions.from_rows(rows, rows.clone(), folds=4)
    assert [(s.auc, s.accuracy, s.d_prime) for s in found.scores.values()] == [(0.5, 0.0, 0.0)] * 2
    assert (found.project(random(1, 2, 3, 4)) == 0).all()
    assert (found.cosine(random(1, 2, 3, 4)) == 0).all()
    with pytest.raises(SpecError, match="the class means are equal"):
        found[0].probe()
    with pytest.raises(SpecError, match="the vector is zero"):
        found[0].steer()


@given(seed=st.integers(0, 1000), folds=st.integers(2, 9), pairs=st.integers(9, 12))
@settings(max_examples=30)
def test_scores_are_in_range_and_repeatable(seed: int, folds: int, pairs: int) -> None:
    positive, negative = random(seed, pairs, 2, 5), random(seed + 1, pairs, 2, 5)
    first, second = (
        Directions.from_rows(positive, negative, folds=folds, seed=seed) for _ in range(2)
    )
    assert first.num_folds == folds
    assert first.scores == second.scores
    assert all(0 <= s.auc <= 1 and 0 <= s.accuracy <= 1 for s in first.scores.values())


def test_wrong_arguments_are_rejected() -> None:
    rows = random(0, 4, 2, 3)
    fit = Directions.from_rows
    for given_, match in (
        ({"method": "pcs"}, r"method: expected one of .*did you mean `pca`"),
        ({"method": 3}, "method: expected one of .*, got `int`"),
        ({"folds": 1}, "folds: expected 0, or at least 2, got 1"),
        ({"folds": -1}, "folds: expected 0, or at least 2, got -1"),
        ({"seed": -1}, "seed: expected 0 or more, got -1"),
        ({"site": "resid_pst"}, "site: unknown site 'resid_pst'"),
        ({"layers": [3]}, "layers: expected 2 distinct layers"),
        ({"layers": [3, 3]}, "layers: expected 2 distinct layers"),
        ({"groups": "abcd"}, "groups: expected a list of keys, got `str`"),
        ({"groups": [1, 2, 3]}, "groups: expected 4 keys, one for each positive, got 3"),
        ({"groups": [[1], [2], [3], [4]]}, "groups: expected keys that can be hashed"),
    ):
        with pytest.raises(SpecError, match=match):
            fit(rows, rows, **{"method": "mean", **given_})
    with pytest.raises(SpecError, match=r"positive: expected real numbers .*got float32 \[2, 3\]"):
        fit(rows[0], rows)
    with pytest.raises(SpecError, match="positive: has numbers that are not finite"):
        fit(rows / 0, rows)
    with pytest.raises(SpecError, match=r"negative: its rows have layers \(0,\)"):
        fit(rows, rows[:, :1])
    with pytest.raises(SpecError, match=r"method: .pca. needs pairs, got 4 positive and 3"):
        fit(rows, rows[:3], "pca")
    with pytest.raises(SpecError, match=r"method: .lat. needs at least 3 pairs, got 2"):
        fit(rows[:2], rows[:2], "lat")
    with pytest.raises(SpecError, match="groups: the two rows of a pair must be of one group"):
        fit(rows, rows, "pca", groups=([1, 2, 3, 4], [4, 3, 2, 1]))


def test_layers_are_chosen_by_their_index() -> None:
    positive, negative, _ = planted(30.0)
    found = Directions.from_rows(positive, negative, layers=[4, 9, 2])
    assert found.layers == (2, 4, 9)
    assert found.best_layer == 9
    np.testing.assert_allclose(found[4].vector, (positive - negative).mean(0)[0], atol=1e-6)
    few = found.at([9, 4])
    assert isinstance(few, Directions)
    assert few.layers == (4, 9)
    assert few[9].score == found[9].score
    np.testing.assert_array_equal(few[9].midpoint, found[9].midpoint)
    for layer in (3, -1, "4", True):
        with pytest.raises(SpecError, match=r"layer: expected one of \[2, 4, 9\], got"):
            found[layer]
    assert "9 *" in str(found)
    assert "<td>9 *</td>" in found._repr_html_()


@pytest.mark.parametrize("method", ["mean", "lda", "logistic"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_no_class_is_held_out_whole(method: str, is_swapped: bool) -> None:
    """Where a class has two groups, and one is the other class's too."""
    rows = 100 + random(0, 5, 1, 4), 110 + random(1, 2, 1, 4)
    keys = list("sabcd"), list("sn")
    order = (1, 0) if is_swapped else (0, 1)
    found = Directions.from_rows(
        *(rows[nth] for nth in order), method, groups=tuple(keys[nth] for nth in order)
    )
    # The classes lie apart, and both far from zero, the mean of no rows.
    assert found.scores[0].auc == found.scores[0].accuracy == 1.0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.integers(2, 7),
    st.integers(0, 3),
)
def test_both_classes_have_rows_outside_of_every_fold(
    positive: list[int], negative: list[int], most: int, seed: int
) -> None:
    found = Folds.assign(np.array(positive), np.array(negative), most, seed)
    assert (found.count == 0) == (min(len(set(positive)), len(set(negative))) < 2)
    if not found.count:
        return
    sides = found.positive.tolist(), found.negative.tolist()
    assert all(len(set(side)) > 1 for side in sides)
    assert set(sides[0]) | set(sides[1]) == set(range(found.count))
    pairs = zip([*positive, *negative], [*sides[0], *sides[1]], strict=True)
    assert len(set(pairs)) == len({*positive, *negative}), "a group is in two folds"


def test_a_layer_at_which_no_class_varies_is_the_best() -> None:
    apart, noisy = torch.ones(6, 1, 4), torch.randn(6, 1, 4)
    found = Directions.from_rows(
        torch.cat([apart, noisy + 2], 1), torch.cat([-apart, noisy.flip(0)], 1)
    )
    assert found.scores[0].auc == 1.0
    assert found.scores[0].d_prime > 1e9 > found.scores[1].d_prime
    assert found.best_layer == 0


def test_layers_that_are_no_indices_are_rejected_by_name() -> None:
    rows = random(0, 4, 2, 4)
    for wrong in ([0.5, 1.7], "01", ["a", "b"], [True, False]):
        with pytest.raises(SpecError, match="^layers: expected"):
            Directions.from_rows(rows, rows, layers=wrong)
    for wrong in ({1.5: rows[:, 0]}, {"x": rows[:, 0]}):
        with pytest.raises(SpecError, match="^positive: expected `int`"):
            Directions.from_rows(wrong, wrong)
    twice = {0: rows[:, 0], "0": rows[:, 1]}
    with pytest.raises(SpecError, match="positive: expected each layer once"):
        Directions.from_rows(twice, twice)
    found = Directions.from_rows(rows + 1, rows)
    for wrong in (0.9, [0.9], "all"):
        with pytest.raises(SpecError, match="^layers: expected"):
            found.at(wrong)
    assert found.at(np.array([1])).layers == found.at(1).layers == (1,)


def test_rows_are_projected_as_lists_and_with_gradients_too() -> None:
    rows = random(0, 4, 2, 4)
    found = Directions.from_rows(rows + 1, rows)
    given_ = random(1, 2, 3, 4)
    wanted = found.project(given_)
    assert (found.project(given_.clone().requires_grad_()) == wanted).all()
    np.testing.assert_allclose(found.project(given_.tolist()), wanted, atol=1e-5)


def test_the_perplexity_of_what_cannot_follow_is_infinite() -> None:
    for number in (-1000.0, -np.inf):
        assert TextScore((1,), np.array([number], np.float32)).perplexity == np.inf
    assert TextScore((1,), np.array([0.0], np.float32)).perplexity == 1.0
