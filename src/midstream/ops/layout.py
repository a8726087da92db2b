r"""Layout of the `site` op's buffers, and its instruction set.

A batch has T rows, one per token (padding included). All buffers keep their addresses for the life
of the engine, so that a captured CUDA graph can be replayed with new contents. `bank` and `ring`
are made of units of U numbers, as sites may differ in the width of their vectors.

With h the stream of one token at a site (both halves summed, float32) and g the gate (1 before the
first `GATE`), a program is a list of instructions, each of which adds f · v to h. Those from
`REPLACE` on compute their result from the terms without a difference to h, as a short result would
have the rounding of a long h:

| code | f | v |
|---|---|---|
| `ADD` | a | write |
| `ADD_MATCHED` | a · ‖h‖ | write |
| `CLIP` | c · (clip(x, a, b) − x), x = ⟨h, read⟩ | write |
| `LINEAR` | a · (⟨h, read⟩ + b) | write |
| `FEATURE` | c · act(⟨h, read⟩ + a) + d, act(x) = x where x > b, else 0 | write |
| `REPLACE` | a | write − h |
| `SCALE` | a − 1 | h |
| `MULTIPLY` | a | write ⊙ h − h |
| `RAISE` | a | m + b · max(\|m\|, 1) + write − h, m the largest component of h |
| `MAP` | a | M h + write − h, M the matrix [W, W] whose rows begin at read |
| `RECONSTRUCT` | a | s − b · h, s what the last `CODE` made of the token |
| `GATE` | none: g = σ(c · (x − b)), or x > b with `STEP`; x = ⟨h, read⟩ + a, or a score | |
| `PROBE` | none: score = ⟨h, read⟩ + a | |
| `UNIT` | none: u = u + b · act(⟨h, read⟩ + a), act the activation of number c | |
| `SCAN` | none: a score of all tokens of a request, in order; see below | |
| `CODE` | none: s = what an SAE makes of h; read is its description | |

An instruction with a mask, a vector of ones and zeros, reads and changes only the components where
the mask is one: in its row of the table, h and v are zero elsewhere. m is that of all components.

A `UNIT` is a hidden unit of a small MLP: u, which is 0 at first, takes the place of ⟨h, read⟩ in
the `PROBE` with `UNITS` that follows, and is 0 again. With `ADDS`, what a `PROBE` or `GATE` reads
is added to the score in its slot, which is of the same token at an earlier site.

A program has at most one `MAP` or `CODE` at a site, and nothing before it changes h. So what it
computes is of the stream on entry, and kernels of their own do so for all rows before the programs
run. `midstream.ops.sae.layout` has the descriptions of SAEs. `CODE` and `RECONSTRUCT` may be at
different sites: that of a transcoder's input, and that of its output.

A `SCAN` is a score with state, for gates with memory. It is computed before the programs run, for
all rows of a request in order, and read by a `GATE` with its slot, at this site or a later one.
With x = ⟨h, read⟩ + a, h the stream on entry, and the state (s, left) of the token before:

    s = x if there is none, else s + d · (x − s)
    left = 1 + hold if s > (c if left > 0 else b), else max(left − 1, 0)

The score is 1 if left > 0, else 0, with `STEP`; without, it is s. hold is the column WRITE. A token
whose id is not listed leaves the state as it is. Each state belongs to one site.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum, IntFlag

# tokens: int32 [max tokens, TOKEN_COLUMNS]. All zero: idle token, without edits or captures.
PROGRAM = 0  # row of `table` with this token's edits; 0: idle, and the other columns are not read
GROUP = 1  # row of `table` with this token's places within its record
RECORD = 2  # 1 + unit at which this token's record begins, from `FIRST` on; 0: not captured
POSITION = 3  # the token's position in its request; read by ROW_BY_POSITION only
TOKEN_COLUMNS = 4

# ids: int32 [max tokens, ID_COLUMNS]. Only instructions for some tokens read it.
TOKEN_ID = 0
SELECTED = 1  # bits: by which of its request's automata the token is selected
ID_COLUMNS = 2

# tally: int32 [max tokens, TALLY_COLUMNS + n]. Counts of the work done per token in this forward
# pass, and n doses of edits; see `Doses` in `midstream.runtime.worker.step.doses`.
SIGNATURE = 0  # sum (wrapping) of the codes of the sites that ran
EDITS = 1  # instructions with COUNTED that were executed
CAPTURES = 2  # vectors written to the ring
NONFINITE = 3  # 1 if the row had a value that is not finite, or an edit went beyond `limit_of`
TALLY_COLUMNS = 4
# From there on, bits of the float32 ‖h after − h before‖ / ‖h before‖ of an edit; 0: none, and 1
# stands for a change of 0.
DOSES = TALLY_COLUMNS
NO_CHANGE = 1

# table: int32 [sites, rows, TABLE_COLUMNS]; a tap holds its own [rows, TABLE_COLUMNS].
EDIT_START = 0  # first of this program's instructions at this site
EDIT_COUNT = 1  # number of these instructions
PLACE = 2  # 1 + unit of a record of this group at which this site's vector begins; 0: not captured
KIND = 3  # rows of programs: what their instructions at this site are; see `kind_of`
FIRST = 0  # row 0: ring unit at which the step's first record begins; −1: no token is captured
CODE = 3  # row 0: the site's code, which goes into the signature
TABLE_COLUMNS = 4

# Kinds: PLAIN only adds vectors, READS only stores scores. From `WITH_MAP` on: the instruction with
# the number kind − `WITH_MAP` is a MAP. Below 0: the instruction with the number −1 − kind is a
# CODE.
ANY, PLAIN, READS, WITH_MAP = 0, 1, 2, 3

IDLE_PROGRAM = 0
# Active without edits: the program of tokens that are only captured, or only checked for taps.
WATCH_PROGRAM = 1
FIRST_FREE_PROGRAM = 2
NO_GROUP = 0
FIRST_FREE_GROUP = 1

# instructions: int32 [E, INSTRUCTION_COLUMNS].
OP = 0  # an Op
READ = 1  # unit of `bank` at which the read vector begins
WRITE = 2  # unit of `bank` at which the write vector begins; of a SCAN: hold
SLOT = 3  # 1 + column of `scores`, or of doses where the op changes h; 0: none
FLAGS = 4  # Flags
IDS_START = 5  # first of the instruction's token ids in `lists`; by bit, the number of the bit
# Number of these ids; 0: it applies to every token, `BY_BIT`: to those with a bit of `SELECTED`.
IDS_COUNT = 6
MASK = 7  # 1 + unit of `bank` at which the mask begins; 0: none
INSTRUCTION_COLUMNS = 8

# params: float32 [E, PARAM_COLUMNS]: a, b, c, d of the table above.
A, B, C, D = range(4)
PARAM_COLUMNS = 4
BY_BIT = -1
MAX_BITS = 31

# Largest magnitude that an edit writes. The squares of a row of such values can be summed in
# float32, so the norms of the layers that follow do not overflow.
LIMIT = 2.0**53
# float16 ends at 65504: half of it, so that the layers' additions to the stream do not overflow.
FLOAT16_LIMIT = 32752.0

# lists: int32 [L]: token ids of the instructions that have such a list.
# scores: float32 [max tokens, slots]: probe scores, for gates at later sites and for the host. The
# last MEMORY_COLUMNS · states of them are what each state is after the token: s, and left as the
# bits of an int32.
MEMORY_COLUMNS = 2

# scans: int32 [states, SCAN_COLUMNS]: which rows of the batch the SCANs of one slot have, for each
# state. The rows are those of one request; some of them may have no such SCAN.
SCAN_ROW = 0  # first row
SCAN_COUNT = 1  # number of rows; 0: the state's request has none in this step
SCAN_SLOT = 2  # 1 + column of `scores`
SCAN_SITE = 3  # the code of the site where the SCAN is, as in `table`
SCAN_COLUMNS = 4

# scan_states: int32 [states, n, STATE_COLUMNS]: the states after the last n positions of a request.
# A step may compute positions again, as draft tokens are rejected: it starts from the last state
# before its first position, and drops those of later positions.
STATE_POSITION = 0  # 1 + position; 0: there is no state here
STATE_SCORE = 1  # s, the bits of a float32
STATE_LEFT = 2  # left; −1: no score was read yet
STATE_COLUMNS = 3
HELD = 1 << 30  # hold that no request outlasts


class Op(IntEnum):
    """Operation code of an instruction; see the module's table."""

    ADD = 0
    ADD_MATCHED = 1
    CLIP = 2
    LINEAR = 3
    FEATURE = 4
    REPLACE = 5
    SCALE = 6
    MULTIPLY = 7
    RAISE = 8
    MAP = 9
    RECONSTRUCT = 10
    GATE = 11
    PROBE = 12
    SCAN = 13
    CODE = 14
    UNIT = 15


class Flags(IntFlag):
    """Modifiers of an instruction."""

    NONE = 0
    # h is read again, with all edits so far: instructions of one edit read the same h. Where a dose
    # is measured, its edit begins at the last FRESH.
    FRESH = 1
    GATED = 2  # f is multiplied by g
    KEEP = 4  # afterwards the vector, where the mask is one, is rescaled to the norm of h
    COUNTED = 8  # counts in the tally: on the last instruction of an edit, and on a probe's
    ROW_BY_POSITION = 16  # the write vector begins the token's position times its length later
    STEP = 32  # the gate is 0 or 1
    OTHER_IDS = 64  # the instruction applies to tokens whose id is *not* in its list
    ADDS = 128  # the score in the slot is added to what is read
    UNITS = 256  # a PROBE reads the sum of the UNITs before it, not the stream


# Plain integers: operations on flags take several times as long.
_OF_PLAIN = int(Flags.FRESH | Flags.COUNTED)
_OF_READS = int(Flags.FRESH | Flags.COUNTED | Flags.ADDS)


def simple_kind(op: Op, flags: Flags, is_partial: bool, has_slot: bool) -> int:
    """Return the kind of a program of such instructions alone: PLAIN, READS or ANY.

    `is_partial`: it is for some tokens or some components alone.
    """
    if is_partial:
        return ANY
    if op == Op.ADD:
        return ANY if int(flags) & ~_OF_PLAIN else PLAIN
    return READS if op == Op.PROBE and has_slot and not int(flags) & ~_OF_READS else ANY


def kind_of(ops: Sequence[Op], simple: Collection[int] = ()) -> int:
    """Return the kind of a program at a site for `KIND`; `simple`: the instructions' own kinds, see
    `simple_kind`.
    """
    if ops.count(Op.RECONSTRUCT) > 1:
        raise ValueError("two RECONSTRUCTs of one token at one site")
    places = [index for index, op in enumerate(ops) if op in (Op.MAP, Op.CODE)]
    if not places:
        kinds = set(simple)
        return kinds.pop() if len(kinds) == 1 else ANY
    if len(places) > 1:
        raise ValueError("two of MAPs and CODEs of one token at one site")
    (place,) = places
    if any(op < Op.GATE for op in ops[:place]):
        raise ValueError(f"an instruction before the {ops[place].name} changes h")
    return WITH_MAP + place if ops[place] is Op.MAP else -1 - place


# Activations of UNITs, by number. `gelu` is x · Φ(x), with the error function.
ACTIVATIONS = ("relu", "gelu", "tanh", "silu")


def limit_of(dtype: str) -> float:
    """Return the largest magnitude that an edit writes into a stream of this dtype."""
    return FLOAT16_LIMIT if dtype == "float16" else LIMIT
