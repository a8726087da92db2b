"""A direction between two classes by difference of means, and its scores.

This module is independent of the model: its input is one tensor of activations per class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerScore:
    """Scores of one layer's direction on sentences that it was not fitted on.

    Attributes:
        auc: probability that a random positive lies further along it than a random negative; 0.5
            is guessing.
        accuracy: fraction on the right side of the midpoint between the two class means.
        d_prime: distance between the classes, in standard deviations within a class.
    """

    auc: float
    accuracy: float
    d_prime: float


@dataclass(frozen=True)
class Fit:
    """Directions and scores of all layers.

    Attributes:
        direction: float32 `[layers, hidden]`, mean of the positives less mean of the negatives.
            Not normalised: adding it once moves a vector from one class mean to the other.
        midpoint: float32 `[layers, hidden]`, halfway between the two class means.
        scores: one per layer, by cross-validation.
        num_folds: number of folds of the cross-validation.
    """

    direction: torch.Tensor
    midpoint: torch.Tensor
    scores: tuple[LayerScore, ...]
    num_folds: int

    @property
    def best_layer(self) -> int:
        """Index of the layer with the largest d′; the first of equals."""
        return max(range(len(self.scores)), key=lambda layer: self.scores[layer].d_prime)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Project rows onto the direction: −1 is the negative class mean, +1 the positive.

        Args:
            rows: `[layers, tokens, hidden]`.

        Returns:
            float32 `[layers, tokens]`.
        """
        return _between(rows.float(), self.direction, self.midpoint)

    def cosine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the cosine between the direction and rows less the midpoint, −1 to 1.

        Unlike `project`, it is comparable between layers with different norms.

        Args:
            rows: `[layers, tokens, hidden]`.

        Returns:
            float32 `[layers, tokens]`.
        """
        seen = rows.float() - self.midpoint[:, None]
        return torch.nn.functional.cosine_similarity(seen, self.direction[:, None], dim=-1)


def fit(positive: torch.Tensor, negative: torch.Tensor, num_folds: int = 6, seed: int = 0) -> Fit:
    """Fit one direction per layer, and score each on held-out pairs.

    The scores are from cross-validation by pairs: for each fold, the direction is fitted without
    the fold's pairs and then scored on them. Both halves of a pair are held out together, because
    one half would reveal the other's topic.

    Args:
        positive: `[pairs, layers, hidden]`, any float dtype.
        negative: the same shape; row i is the other half of positive's row i.
        num_folds: 2 to the number of pairs.
        seed: seed of the shuffle that assigns pairs to folds.

    Raises:
        ValueError: the shapes differ or are not three-dimensional, or num_folds is out of range.
    """
    if positive.shape != negative.shape or positive.dim() != 3:
        raise ValueError(
            "expected two tensors of one shape [pairs, layers, hidden], got"
            f" {list(positive.shape)} and {list(negative.shape)}"
        )
    num_pairs = len(positive)
    if not 2 <= num_folds <= num_pairs:
        raise ValueError(f"expected 2 to {num_pairs} folds for {num_pairs} pairs, got {num_folds}")
    positive, negative = positive.float(), negative.float()
    held_out = _cross_validate(positive, negative, num_folds, seed)
    direction, midpoint = _means(positive, negative)
    scores = tuple(_score(*layer) for layer in zip(*(x.unbind(-1) for x in held_out), strict=True))
    return Fit(direction, midpoint, scores, num_folds)


def _cross_validate(
    positive: torch.Tensor, negative: torch.Tensor, num_folds: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project each sentence onto a direction fitted without it: two tensors `[pairs, layers]`."""
    order = torch.randperm(len(positive), generator=torch.Generator().manual_seed(seed))
    places = [torch.empty(positive.shape[:2]) for _ in range(2)]
    for fold in order.tensor_split(num_folds):
        kept = torch.ones(len(positive), dtype=torch.bool)
        kept[fold] = False
        direction, midpoint = _means(positive[kept], negative[kept])
        for place, rows in zip(places, (positive, negative), strict=True):
            place[fold] = _between(rows[fold].transpose(0, 1), direction, midpoint).T
    return places[0], places[1]


def _means(positive: torch.Tensor, negative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return direction and midpoint, `[layers, hidden]`, of tensors `[pairs, layers, hidden]`."""
    upper, lower = positive.mean(0), negative.mean(0)
    return upper - lower, (upper + lower) / 2


def _between(rows: torch.Tensor, direction: torch.Tensor, midpoint: torch.Tensor) -> torch.Tensor:
    """Project `[layers, tokens, hidden]` to `[layers, tokens]`, −1 and 1 at the class means."""
    half_gap = direction.square().sum(-1) / 2
    # If the class means are equal, the layer separates nothing: every projection is 0.
    half_gap = torch.where(half_gap > 0, half_gap, torch.inf)
    along = torch.einsum("lth,lh->lt", rows - midpoint[:, None], direction)
    return along / half_gap[:, None]


def _score(positive: torch.Tensor, negative: torch.Tensor) -> LayerScore:
    """Return the scores of one layer from its held-out projections, two tensors `[pairs]`."""
    wins = positive[:, None] > negative[None]
    ties = positive[:, None] == negative[None]
    right = torch.cat([positive > 0, negative < 0])
    spread = ((positive.var() + negative.var()) / 2).sqrt()
    gap = positive.mean() - negative.mean()
    return LayerScore(
        auc=float((wins + ties / 2).mean()),
        accuracy=float(right.float().mean()),
        d_prime=float(gap / spread) if spread > 0 else 0.0,
    )
