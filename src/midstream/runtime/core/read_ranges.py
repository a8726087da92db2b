"""Where a probe reads each position, and which scores there meet nothing: what is looked at for
each request in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from midstream.runtime.protocol.acting_probes import ActingProbe


class ReadRange(NamedTuple):
    """The last range of positions that a probe reads, whatever the tokens there are. Scores from
    `low` to `high` are not beyond its threshold; what is not a number is not within them.
    """

    slot: int
    start: int
    stop: float
    low: float
    high: float


def read_ranges(probes: Sequence[ActingProbe]) -> tuple[ReadRange, ...] | None:
    """Return the last range of each probe; None: one has none, or pools its scores."""
    ranges = []
    for probe in probes:
        condition = probe.condition
        if condition.pool != "none" or not probe.where.ranges:
            return None
        start, stop = probe.where.ranges[-1]
        low = -math.inf if condition.below is None else condition.below
        high = math.inf if condition.above is None else condition.above
        ranges.append(ReadRange(probe.slot, start, math.inf if stop is None else stop, low, high))
    return tuple(ranges)
