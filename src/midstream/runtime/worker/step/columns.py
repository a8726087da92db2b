"""Columns of the planner's integer tables."""

from __future__ import annotations

# segments: int64 [slots, SEGMENT_COLUMNS], see `SlotTable`.
START = 0  # first position of the segment
STOP = 1  # last position + 1
PROGRAM = 2
CONTENT = slice(2, 9)  # what each row of the segment gets: the columns of runs from RUN_PROGRAM on
SEGMENT_COLUMNS = 9

# runs: int64 [RUN_COLUMNS, runs], column by column; see `TokenRuns` for what the columns hold.
RUN_ROW = 0
RUN_LENGTH = 1
RUN_POSITION = 2
RUN_SLOT = 3
RUN_PROGRAM = 4
RUN_GROUP = 5
RUN_VECTORS = 6
RUN_UNITS = 7
RUN_KIND = 8
RUN_SCORED = 9
RUN_CODEC = 10
RUN_COLUMNS = 11
