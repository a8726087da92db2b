"""Set operations on position ranges: intersection, difference, complement, overlay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from midstream.spec.positions.ranges import Range, Ranges


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """Return the positions in both of two well-formed sets."""
    found: list[Range] = []
    left, right = 0, 0
    while left < len(one) and right < len(other):
        (start, stop), (other_start, other_stop) = one[left], other[right]
        low, high = max(start, other_start), least(stop, other_stop)
        if high is None or low < high:
            found.append((low, high))
        # The range that ends first cannot intersect later ranges.
        if stop is not None and stop == high:
            left += 1
        else:
            right += 1
    return tuple(found)


def subtract(one: Ranges, other: Ranges) -> Ranges:
    """Return the positions in `one` but not in `other`, of two well-formed sets."""
    return intersect(one, complement(other))


def complement(ranges: Ranges) -> Ranges:
    """Return the positions ≥ 0 that are not in a well-formed set."""
    found: list[Range] = []
    reached: int | None = 0
    for start, stop in ranges:
        if reached is not None and reached < start:
            found.append((reached, start))
        reached = stop
    return (*found, (reached, None)) if reached is not None else tuple(found)


def least(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two range ends; None means unbounded."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def overlay(parts: Sequence[Ranges]) -> Iterator[tuple[int, int | None, tuple[int, ...]]]:
    """Split the positions at every start and stop of several well-formed sets.

    Yields:
        (start, stop, indices of the sets that contain [start, stop)), in order from position 0;
        the last stop is None.
    """
    # Sweep line: the sets that start or stop at each bound.
    bounds: dict[int, list[int]] = {0: []}
    for nth, ranges in enumerate(parts):
        for start, stop in ranges:
            bounds.setdefault(start, []).append(nth)
            if stop is not None:
                bounds.setdefault(stop, []).append(nth)
    ordered: list[int | None] = [*sorted(bounds), None]
    active: set[int] = set()
    for begin, end in zip(ordered, ordered[1:], strict=False):
        assert begin is not None
        for nth in bounds[begin]:
            active ^= {nth}
        yield begin, end, tuple(sorted(active))
