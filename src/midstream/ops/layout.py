"""The columns of the buffers that the planner fills and the `site` op reads, and its instructions.

A batch has T rows, one per token (padding included). All buffers stay at one address for the
life of the engine, so that a captured CUDA graph can be replayed over new contents.

With h the stream of one token at a site (both halves summed, float32) and g the gate (1 unless a
`GATE` came before), a program is a list of instructions, each of which adds f · v to h:

| code | f | v |
|---|---|---|
| `ADD` | a | write |
| `ADD_MATCHED` | a · ‖h‖ | write |
| `CLIP` | c · (clip(x, a, b) − x), x = ⟨h, read⟩ | write |
| `LINEAR` | a · (⟨h, read⟩ + b) | write |
| `FEATURE` | c · act(⟨h, read⟩ + a) + d, act(x) = x where x > b, else 0 | write |
| `REPLACE` | a | write − h |
| `SCALE` | a − 1 | h |
| `GATE` | none: g = σ(c · (x − b)), or x > b with `STEP`; x = ⟨h, read⟩ + a, or a score | |
| `PROBE` | none: score = ⟨h, read⟩ + a | |

"""

from __future__ import annotations

from enum import IntEnum, IntFlag

# tokens: int32 [max tokens, TOKEN_COLUMNS]. All zero: this token asks for nothing.
PROGRAM = 0  # row of `table` with this token's edits; 0: idle, and the other columns are not read
GROUP = 1  # row of `table` with this token's places within its record
RECORD = 2  # 1 + row of the staging ring at which this token's record begins; 0: captured nowhere
POSITION = 3  # the token's position in its request; read by ROW_BY_POSITION only
TOKEN_COLUMNS = 4

# ids: int32 [max tokens]: each token's id. Only instructions with a list of ids read it.

# tally: int32 [max tokens, TALLY_COLUMNS]. What the device did for this token in this forward.
SIGNATURE = 0  # sum (wrapping) of the codes of the sites that ran
EDITS = 1  # instructions with COUNTED that were carried out
CAPTURES = 2  # vectors written to the ring
TALLY_COLUMNS = 4

# table: int32 [sites, rows, TABLE_COLUMNS]; a tap holds its own [rows, TABLE_COLUMNS].
EDIT_START = 0  # first of this program's instructions at this site
EDIT_COUNT = 1  # how many
PLACE = 2  # 1 + this site's place within a record of this group; 0: not captured
CODE = 3  # row 0: the site's code, which goes into the signature
READS = 3  # rows of programs: 1 where an instruction at this site needs h, else 0
TABLE_COLUMNS = 4

IDLE_PROGRAM = 0
# Active, without edits: what a token has that is only captured, or only checked for taps.
WATCH_PROGRAM = 1
FIRST_FREE_PROGRAM = 2
NO_GROUP = 0
FIRST_FREE_GROUP = 1

# instructions: int32 [E, INSTRUCTION_COLUMNS].
OP = 0  # an Op
READ = 1  # row of `bank` with the read vector
WRITE = 2  # row of `bank` with the write vector
SLOT = 3  # 1 + column of `scores`; 0: none
FLAGS = 4  # Flags
IDS_START = 5  # first of the instruction's token ids in `lists`
IDS_COUNT = 6  # how many; 0: the instruction applies whatever the token's id
INSTRUCTION_COLUMNS = 8

# params: float32 [E, PARAM_COLUMNS]: a, b, c, d of the table above.
A, B, C, D = range(4)
PARAM_COLUMNS = 4

# lists: int32 [L]: token ids of the instructions that have such a list.
# scores: float32 [max tokens, slots]: what probes read, for gates at later sites and for the host.


class Op(IntEnum):
    """What an instruction does; see the module."""

    ADD = 0
    ADD_MATCHED = 1
    CLIP = 2
    LINEAR = 3
    FEATURE = 4
    REPLACE = 5
    SCALE = 6
    GATE = 7
    PROBE = 8


class Flags(IntFlag):
    """Modifiers of an instruction.

    FRESH: h is taken anew, with all edits so far in it. Without it, h is what it was at the last
        FRESH: the instructions of one edit read the same h.
    GATED: f is multiplied by g.
    KEEP: afterwards the whole vector is scaled back to the norm that h had.
    COUNTED: counts as one in the tally. The last instruction of an edit has it, and a probe's.
    ROW_BY_POSITION: the write vector is in row WRITE + the token's position.
    STEP: the gate is 0 or 1.
    OTHER_IDS: the instruction applies to tokens whose id is *not* in its list.
    """

    NONE = 0
    FRESH = 1
    GATED = 2
    KEEP = 4
    COUNTED = 8
    ROW_BY_POSITION = 16
    STEP = 32
    OTHER_IDS = 64
