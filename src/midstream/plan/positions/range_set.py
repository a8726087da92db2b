"""Set operations on position ranges: intersection, difference, complement, overlay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from midstream.plan.positions.ranges import Range, Ranges


def intersect(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the positions in both of two well-formed sets."""
    common: list[Range] = []
    left, right = 0, 0
    while left < len(ranges) and right < len(other):
        (start, stop), (other_start, other_stop) = ranges[left], other[right]
        low, high = max(start, other_start), least(stop, other_stop)
        if high is None or low < high:
            common.append((low, high))
        # The range that ends first cannot intersect later ranges.
        if stop is not None and stop == high:
            left += 1
        else:
            right += 1
    return tuple(common)


def subtract(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the positions in `ranges` but not in `other`, of two well-formed sets."""
    return intersect(ranges, complement(other))


def complement(ranges: Ranges) -> Ranges:
    """Return the positions ≥ 0 that are not in a well-formed set."""
    gaps: list[Range] = []
    reached: int | None = 0
    for start, stop in ranges:
        if reached is not None and reached < start:
            gaps.append((reached, start))
        reached = stop
    return (*gaps, (reached, None)) if reached is not None else tuple(gaps)


def least(end: int | None, other: int | None) -> int | None:
    """Return the smaller of two range ends; None means unbounded."""
    if end is None or other is None:
        return other if end is None else end
    return min(end, other)


def overlay(parts: Sequence[Ranges]) -> Iterator[tuple[int, int | None, tuple[int, ...]]]:
    """Yield (start, stop, indices of the sets with [start, stop)), split at every bound, from 0."""
    # Sweep line: the sets that start or stop at each bound.
    bounds: dict[int, list[int]] = {0: []}
    for index, ranges in enumerate(parts):
        for start, stop in ranges:
            bounds.setdefault(start, []).append(index)
            if stop is not None:
                bounds.setdefault(stop, []).append(index)
    ordered: list[int | None] = [*sorted(bounds), None]
    active: set[int] = set()
    for begin, end in zip(ordered, ordered[1:], strict=False):
        assert begin is not None
        for index in bounds[begin]:
            active ^= {index}
        yield begin, end, tuple(sorted(active))
