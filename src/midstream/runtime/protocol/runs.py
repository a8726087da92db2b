"""Runs of consecutive positions or rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def within_runs(lengths: Ints) -> Ints:
    """Return the index of each row within its run, for runs of these lengths laid end to end.

    Args:
        lengths: int64 [runs].

    Returns:
        int64 [sum of lengths].
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def joined(first: Ints, length: Ints) -> list[tuple[int, int]]:
    """Return runs of ascending positions as (first, length), adjacent ones as one.

    Args:
        first: int64 [runs], first position of each run.
        length: int64 [runs], number of positions of each.
    """
    if first.size == 1:
        return [(int(first[0]), int(length[0]))]
    gaps = np.flatnonzero(first[1:] != (first + length)[:-1]) + 1
    begin = np.append(0, gaps)[: first.size]
    return list(zip(first[begin].tolist(), np.add.reduceat(length, begin).tolist(), strict=True))


def count_of(runs: Iterable[tuple[int, int]]) -> int:
    """Return the number of positions in (first, length) runs."""
    return sum(length for _, length in runs)


def expand_runs(runs: Iterable[tuple[int, int]]) -> Ints:
    """Return the positions in (first, length) runs."""
    return expand((first, first + length) for first, length in runs)


def expand(ranges: Iterable[tuple[int, int]]) -> Ints:
    """Return the positions in [start, stop) ranges."""
    found = [np.arange(start, stop) for start, stop in ranges]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else np.zeros(0, np.int64)
