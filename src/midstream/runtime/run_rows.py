"""Runs of rows laid out one behind the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def within_runs(lengths: Ints) -> Ints:
    """int64 [sum of lengths]: for each row of runs of these lengths, which of its run it is."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
