"""Position sets as sorted, disjoint, merged, half-open ranges; the last may be unbounded."""

from __future__ import annotations

import math
from collections.abc import Iterable

# [start, stop); a stop of None is the request's end, allowed for the last range only.
Range = tuple[int, int | None]
Ranges = tuple[Range, ...]


def merge(ranges: Iterable[Range]) -> Ranges:
    """Return the union of non-empty ranges given in any order."""
    merged: list[Range] = []
    for start, stop in sorted(ranges, key=lambda span: span[0]):
        if not merged:
            merged.append((start, stop))
            continue
        last_start, last_stop = merged[-1]
        if last_stop is None:
            break
        if start > last_stop:
            merged.append((start, stop))
        else:
            merged[-1] = (last_start, None if stop is None else max(stop, last_stop))
    return tuple(merged)


def clip(ranges: Ranges, length: int) -> tuple[tuple[int, int], ...]:
    """Return the positions below `length`."""
    return tuple(
        (start, length if stop is None else min(stop, length))
        for start, stop in ranges
        if start < length
    )


def count(ranges: Ranges, length: int) -> int:
    """Return the number of positions below `length`."""
    return sum(stop - start for start, stop in clip(ranges, length))


def well_formed(ranges: Ranges) -> bool:
    """Return whether the ranges are sorted, disjoint and merged, as `merge` returns them."""
    previous: float = -1
    for start, stop in ranges:
        end = math.inf if stop is None else stop
        # Adjacent ranges would have been merged; the first may start at 0.
        if start <= previous or end <= start:
            return False
        previous = end
    return True
