"""The direction and its scores, on data whose direction is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.report.fit import fit

PAIRS, LAYERS, HIDDEN = 40, 3, 48


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


def test_recovers_a_planted_direction_and_its_layer() -> None:
    positive, negative, axis = planted(30.0)
    found = fit(positive, negative)
    assert found.best_layer == 1
    assert torch.cosine_similarity(found.direction[1], axis, dim=0) > 0.99
    assert found.direction[1].norm() == pytest.approx(30.0, rel=0.05)
    assert found.scores[1].auc == 1.0
    assert found.scores[1].accuracy == 1.0
    assert found.scores[1].d_prime > 5


def test_the_direction_is_the_difference_of_means_of_all_pairs() -> None:
    positive, negative, _ = planted(5.0)
    found = fit(positive, negative)
    torch.testing.assert_close(found.direction, positive.mean(0) - negative.mean(0))
    torch.testing.assert_close(found.midpoint, (positive.mean(0) + negative.mean(0)) / 2)


def test_random_labels_score_as_chance() -> None:
    scores = []
    for seed in range(20):
        positive, negative, _ = planted(0.0, seed=100 * seed)
        scores += fit(positive, negative, seed=seed).scores
    mean_auc = sum(score.auc for score in scores) / len(scores)
    mean_accuracy = sum(score.accuracy for score in scores) / len(scores)
    mean_d = sum(score.d_prime for score in scores) / len(scores)
    assert mean_auc == pytest.approx(0.5, abs=0.05)
    assert mean_accuracy == pytest.approx(0.5, abs=0.05)
    assert abs(mean_d) < 0.2


def test_scoring_without_holding_out_would_have_looked_better() -> None:
    positive, negative, _ = planted(0.0)
    found = fit(positive, negative)
    seen = [found.project(x.transpose(0, 1)) for x in (positive, negative)]
    cheating = (seen[0] > 0).float().mean() / 2 + (seen[1] < 0).float().mean() / 2
    assert cheating > 0.58
    assert max(score.accuracy for score in found.scores) < cheating


def test_class_means_project_to_one_and_minus_one() -> None:
    positive, negative, _ = planted(4.0)
    found = fit(positive, negative)
    means = torch.stack([positive.mean(0), negative.mean(0)], dim=1)
    expected = torch.tensor([1.0, -1.0]).expand(LAYERS, 2)
    torch.testing.assert_close(found.project(means), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.cosine(means), expected, atol=1e-4, rtol=0)


def test_adding_the_direction_once_moves_the_projection_by_two() -> None:
    positive, negative, _ = planted(4.0)
    found = fit(positive, negative)
    rows = random(9, LAYERS, 5, HIDDEN)
    moved = found.project(rows + found.direction[:, None]) - found.project(rows)
    torch.testing.assert_close(moved, torch.full_like(moved, 2.0), atol=1e-3, rtol=0)


def test_bfloat16_activations_are_fitted_in_float32() -> None:
    positive, negative, _ = planted(30.0)
    found = fit(positive.bfloat16(), negative.bfloat16())
    assert found.direction.dtype == torch.float32
    assert found.best_layer == 1


def test_classes_that_coincide_give_zeros_not_nan() -> None:
    rows = random(0, 8, 2, 4)
    found = fit(rows, rows.clone(), num_folds=4)
    assert [(s.auc, s.accuracy, s.d_prime) for s in found.scores] == [(0.5, 0.0, 0.0)] * 2
    assert torch.isfinite(found.project(random(1, 2, 3, 4))).all()
    assert torch.isfinite(found.cosine(random(1, 2, 3, 4))).all()


@given(seed=st.integers(0, 1000), folds=st.integers(2, 9), pairs=st.integers(9, 12))
@settings(max_examples=30)
def test_scores_are_in_range_and_repeatable(seed: int, folds: int, pairs: int) -> None:
    positive, negative = random(seed, pairs, 2, 5), random(seed + 1, pairs, 2, 5)
    scores = fit(positive, negative, folds, seed).scores
    assert scores == fit(positive, negative, folds, seed).scores
    assert all(0 <= s.auc <= 1 and 0 <= s.accuracy <= 1 for s in scores)


def test_wrong_shapes_and_folds_are_refused() -> None:
    rows = random(0, 4, 2, 3)
    with pytest.raises(ValueError, match=r"one shape \[pairs, layers, hidden\], got \[4, 2, 3\]"):
        fit(rows, rows[:3])
    with pytest.raises(ValueError, match="one shape"):
        fit(rows[0], rows[0])
    for folds in (1, 5):
        with pytest.raises(ValueError, match=f"2 to 4 folds for 4 pairs, got {folds}"):
            fit(rows, rows, folds)
