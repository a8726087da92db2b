"""Mean and scatter of rows, accumulated block by block in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Number, mean and scatter of rows."""

    count: int
    mean: Floats  # float64 [width]; zeros without rows
    scatter: Floats | None = None  # Σ (x − mean)(x − mean)ᵀ, [width, width]; None: not asked for

    @staticmethod
    def of(rows: NDArray[Any], with_scatter: bool) -> Moments:
        """Return the moments of rows [n, width]."""
        rows = rows.astype(np.float64, copy=False)
        mean = rows.mean(0) if len(rows) else np.zeros(rows.shape[1])
        centred = rows - mean if with_scatter else None
        return Moments(len(rows), mean, None if centred is None else centred.T @ centred)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both (Chan, Golub and LeVeque 1979): nothing cancels."""
        count = self.count + other.count
        if not (self.count and other.count):
            return other if other.count else self
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        if self.scatter is None or other.scatter is None:
            return Moments(count, mean)
        between = np.outer(apart, apart) * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + between)


def together(parts: list[Moments]) -> Moments:
    return reduce(Moments.__add__, parts)
