"""What random projections still tell of the vectors: lengths, and angles between them.

Sketches are the rows that codec `rp8` decodes to, or `Rp8.sketch` of any vector: both arguments
of a function must be of one projection, that is of one k, seed and hidden.
"""

from __future__ import annotations

from torch import Tensor


def norms(sketches: Tensor) -> Tensor:
    """Estimates ‖x‖, [n] of [n, k]: relative standard deviation √(1 / 2k), 3.1 % for k = 512.

    Its square is an unbiased estimate of ‖x‖², with relative standard deviation √(2/k).
    """
    return sketches.square().sum(dim=1).sqrt()


def inner_products(first: Tensor, second: Tensor) -> Tensor:
    """Estimates every x · y, [n, m] of [n, k] and [m, k], without bias.

    Standard deviation √((‖x‖² ‖y‖² + (x · y)²) / k).
    """
    return first @ second.T


def cosine_similarities(first: Tensor, second: Tensor) -> Tensor:
    """Estimates every x · y / (‖x‖ ‖y‖), [n, m] of [n, k] and [m, k], within ±1.

    Standard deviation about (1 − c²) / √k where the similarity is c, so that near ±1 it is far
    more exact than the inner product. NaN where a sketch is zero throughout.
    """
    return (inner_products(first, second) / norms(first)[:, None] / norms(second)).clamp(-1, 1)
