"""Runs of rows of one request in a step."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.plan.positions.ranges import Ranges


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one request, in consecutive records."""

    request: int  # index of the request in the batch
    record: int  # index of the first record
    length: int
    lowest: int  # position of the first row, or a lower bound
    position: int  # or an upper bound
    keys: tuple[Ranges, ...]  # for each `PatternColumns`, the positions of a mass
