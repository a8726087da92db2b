"""Columns of the planner's integer tables."""

from __future__ import annotations

# segments: int64 [slots, SEGMENT_COLUMNS], see `SlotTable`.
START = 0  # first position of the segment
STOP = 1  # last position + 1
PROGRAM = 2
CONTENT = slice(2, 9)  # what each row of the segment gets: the columns of runs from RUN_PROGRAM on
SEGMENT_COLUMNS = 9

# runs: int64 [RUN_COLUMNS, runs], column by column: the first fields of `TokenRuns`, in order.
RUN_ROW, RUN_LENGTH, RUN_POSITION, RUN_SLOT, RUN_PROGRAM = range(5)
RUN_UNITS, RUN_CODEC, RUN_COLUMNS = 7, 10, 11
