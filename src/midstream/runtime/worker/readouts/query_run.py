"""Runs of rows of one request in a step."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.plan.positions.ranges import Ranges


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one request, in consecutive records.

    Attributes:
        request: index of the request in the batch.
        record: index of the first record.
        lowest, position: position of the first row, or a lower and an upper bound.
        keys: for each `PatternColumns`, the positions of a mass.
    """

    request: int
    record: int
    length: int
    lowest: int
    position: int
    keys: tuple[Ranges, ...]
