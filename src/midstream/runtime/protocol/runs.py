"""Runs of consecutive positions or rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def within_runs(lengths: Ints) -> Ints:
    """Return the index of each row within its run, for runs of these lengths laid end to end."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (first, length) runs of ascending positions with adjacent ones as one."""
    if len(runs) < 2:
        return runs
    merged: list[tuple[int, int]] = []
    first, stop = runs[0][0], runs[0][0]
    for begin, length in runs:
        if begin != stop:
            merged.append((first, stop - first))
            first = begin
        stop = begin + length
    merged.append((first, stop - first))
    return merged


def count_of(runs: Iterable[tuple[int, int]]) -> int:
    return sum(length for _, length in runs)


def expand_runs(runs: Iterable[tuple[int, int]]) -> Ints:
    return expand((first, first + length) for first, length in runs)


def expand(ranges: Iterable[tuple[int, int]]) -> Ints:
    """Return the positions in [start, stop) ranges."""
    arrays = [np.arange(start, stop) for start, stop in ranges]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
