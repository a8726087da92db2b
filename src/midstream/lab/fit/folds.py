"""Folds of a cross-validation, to which whole groups of rows are assigned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Folds:
    """The fold of each row of both classes, int64 [rows]."""

    positive: Indices
    negative: Indices
    count: int  # number of folds; 0: there are too few groups to hold any out

    @staticmethod
    def assign(positive: Indices, negative: Indices, most: int, seed: int) -> Folds:
        """Assign whole groups, int64 [rows], to folds with a share of each class."""
        sides = set(positive.tolist()), set(negative.tolist())
        if most < 2 or min(map(len, sides)) < 2:
            return Folds(np.zeros_like(positive), np.zeros_like(negative), 0)
        shuffle = np.random.default_rng(seed).permutation
        kinds = (sides[0] & sides[1], sides[0] - sides[1], sides[1] - sides[0])
        # Groups of one kind are dealt in turn, so each fold has its share of them.
        dealt = [int(group) for kind in kinds for group in shuffle(sorted(kind))]
        count = min(most, len(dealt))
        fold_of = {group: index % count for index, group in enumerate(dealt)}
        # If a class has two groups, and the other class has one of them too, both may be in one
        # fold. Training without that fold would have nothing of the class.
        for side, own in zip(sides, (sides[0] - sides[1], sides[1] - sides[0]), strict=True):
            if len({fold_of[group] for group in side}) == 1:
                fold_of[min(own)] = (fold_of[min(own)] + 1) % count
        return Folds(_look_up(fold_of, positive), _look_up(fold_of, negative), count)


def number(keys: Iterable[Any], numbers: dict[Any, int]) -> Indices:
    """Return the number of each key; new keys are numbered as they come, and added to `numbers`."""
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _look_up(numbers: dict[int, int], keys: Indices) -> Indices:
    return np.array([numbers[key] for key in keys.tolist()], np.int64)
