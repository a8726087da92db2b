"""Runs of consecutive rows, laid one behind the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def within_runs(lengths: Ints) -> Ints:
    """int64 [sum of lengths]: for each row of runs of these lengths, which of its run it is."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def runs_of(positions: Ints) -> list[list[int]]:
    """Sorted positions as [first, length] runs."""
    if positions.size and positions[-1] - positions[0] == positions.size - 1:
        return [[int(positions[0]), positions.size]]
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [[int(run[0]), int(run.size)] for run in np.split(positions, breaks) if run.size]
