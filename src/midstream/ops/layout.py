"""The columns of the buffers that the planner fills and the `site` op reads.

A batch has T rows, one per token (padding included). All buffers stay at one address for the
life of the engine, so that a captured CUDA graph can be replayed over new contents.
"""

from __future__ import annotations

# tokens: int32 [max tokens, TOKEN_COLUMNS]. All zero: this token asks for nothing.
PROGRAM = 0  # row of `table` with this token's edits; 0: idle, and the other columns are not read
GROUP = 1  # row of `table` with this token's places within its record
RECORD = 2  # 1 + row of the staging ring at which this token's record begins; 0: captured nowhere
TOKEN_COLUMNS = 4

# tally: int32 [max tokens, TALLY_COLUMNS]. What the device did for this token in this forward.
SIGNATURE = 0  # sum (wrapping) of the codes of the sites that ran
EDITS = 1  # edits applied
CAPTURES = 2  # vectors written to the ring
TALLY_COLUMNS = 4

# table: int32 [sites, rows, TABLE_COLUMNS]; a tap holds its own [rows, TABLE_COLUMNS].
EDIT_START = 0  # first of this program's edits at this site
EDIT_COUNT = 1  # how many
PLACE = 2  # 1 + this site's place within a record of this group; 0: not captured
CODE = 3  # row 0 only: the site's code, which goes into the signature
TABLE_COLUMNS = 4

IDLE_PROGRAM = 0
# Active, without edits: what a token has that is only captured, or only checked for taps.
WATCH_PROGRAM = 1
FIRST_FREE_PROGRAM = 2
NO_GROUP = 0
FIRST_FREE_GROUP = 1
