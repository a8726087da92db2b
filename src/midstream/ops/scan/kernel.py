"""Triton kernel of SCANs: one program for each state, which exits after one load if its request has
no row in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.site_kernel import is_infinite, is_listed

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TALLY = tl.constexpr(layout.TALLY_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_PARAMS = tl.constexpr(layout.PARAM_COLUMNS)
_SCANS = tl.constexpr(layout.SCAN_COLUMNS)
_STATES = tl.constexpr(layout.STATE_COLUMNS)
_POSITION = tl.constexpr(layout.POSITION)
_NONFINITE = tl.constexpr(layout.NONFINITE)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_EDIT_COUNT = tl.constexpr(layout.EDIT_COUNT)
_SCAN_ROW = tl.constexpr(layout.SCAN_ROW)
_SCAN_COUNT = tl.constexpr(layout.SCAN_COUNT)
_SCAN_SLOT = tl.constexpr(layout.SCAN_SLOT)
_SCAN_FROM = tl.constexpr(layout.SCAN_FROM)
_SCAN_BEFORE = tl.constexpr(layout.SCAN_BEFORE)
_SCAN_AFTER = tl.constexpr(layout.SCAN_AFTER)
_OPEN = tl.constexpr(layout.OPEN)
_STATE_POSITION = tl.constexpr(layout.STATE_POSITION)
_STATE_SCORE = tl.constexpr(layout.STATE_SCORE)
_STATE_LEFT = tl.constexpr(layout.STATE_LEFT)

_OP = tl.constexpr(layout.OP)
_READ = tl.constexpr(layout.READ)
_WRITE = tl.constexpr(layout.WRITE)
_SLOT = tl.constexpr(layout.SLOT)
_FLAGS = tl.constexpr(layout.FLAGS)
_IDS_START = tl.constexpr(layout.IDS_START)
_IDS_COUNT = tl.constexpr(layout.IDS_COUNT)
_A = tl.constexpr(layout.A)
_B = tl.constexpr(layout.B)
_C = tl.constexpr(layout.C)
_D = tl.constexpr(layout.D)

_STEP = tl.constexpr(int(Flags.STEP))
_OTHER_IDS = tl.constexpr(int(Flags.OTHER_IDS))
_SCAN = tl.constexpr(int(Op.SCAN))


@triton.jit
def _readings(
    hidden,
    residual,
    vector,
    rows,
    chosen,
    hidden_stride,
    residual_stride,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """Return ⟨h, read⟩ of the chosen rows of a tile, h the stream on entry."""
    of_rows = rows.to(tl.int64)[:, None]
    total = tl.zeros([tile, depth], dtype=tl.float32)
    for begin in range(0, width, depth):
        columns = begin + tl.arange(0, depth)
        inside = columns < width
        both = chosen[:, None] & inside[None, :]
        half = hidden + of_rows * hidden_stride + columns[None, :]
        h = tl.load(half, mask=both, other=0.0).to(tl.float32)
        if has_residual:
            rest = residual + of_rows * residual_stride + columns[None, :]
            h += tl.load(rest, mask=both, other=0.0).to(tl.float32)
        total += h * tl.load(vector + columns, mask=inside, other=0.0)[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def scan_kernel(
    hidden,
    residual,
    tokens,
    ids,
    tally,
    table,
    instructions,
    # The params buffer; Triton's launcher reserves the name `params`.
    numbers,
    lists,
    bank,
    scores,
    scans,
    states,
    hidden_stride,
    residual_stride,
    slots,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    kept: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """Go over the rows of one request for one slot, in order: read those of a tile at a time, and
    then update the state row by row.
    """
    state = tl.program_id(0)
    scan = scans + state * _SCANS
    count = tl.load(scan + _SCAN_COUNT)
    if count == 0:
        return
    row = tl.load(scan + _SCAN_ROW)
    slot = tl.load(scan + _SCAN_SLOT)
    stop = row + count
    lanes = tl.arange(0, tile)
    entries = tl.arange(0, kept)
    # The states are kept in registers until the end, so that no store has to wait for another.
    place = states + (state * kept + entries) * _STATES
    marks = tl.load(place + _STATE_POSITION)
    past = tl.load(place + _STATE_SCORE).to(tl.float32, bitcast=True)
    lefts = tl.load(place + _STATE_LEFT)
    begun = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    newest = tl.full((), 0, tl.int32)
    fresh = tl.load(scan + _SCAN_FROM)
    smoothed = tl.load(scan + _SCAN_BEFORE).to(tl.float32, bitcast=True)
    left = tl.load(scan + _SCAN_BEFORE + 1)
    smoothed_after = tl.load(scan + _SCAN_AFTER).to(tl.float32, bitcast=True)
    left_after = tl.load(scan + _SCAN_AFTER + 1)
    while row < stop:
        rows = row + lanes
        program = tl.load(tokens + row * _TOKENS)
        programs = tl.load(tokens + rows * _TOKENS, mask=rows < stop, other=-1)
        alike = tl.min(tl.where(programs == program, tile, lanes), axis=0)
        start = tl.load(table + program * _TABLE + _EDIT_START)
        steps = tl.load(table + program * _TABLE + _EDIT_COUNT)
        found = tl.full((), -1, tl.int32)
        for at in range(start, start + steps):
            word = instructions + at * _INSTRUCTIONS
            is_one = (tl.load(word + _OP) == _SCAN) & (tl.load(word + _SLOT) == slot)
            found = tl.where(is_one, at, found)
        if found >= 0:
            word = instructions + found * _INSTRUCTIONS
            param = numbers + found * _PARAMS
            flags = tl.load(word + _FLAGS)
            hold = tl.load(word + _WRITE)
            ids_count = tl.load(word + _IDS_COUNT)
            every = lists + tl.load(word + _IDS_START)
            bias = tl.load(param + _A)
            opens = tl.load(param + _B)
            closes = tl.load(param + _C)
            weight = tl.load(param + _D)
            vector = bank + tl.load(word + _READ).to(tl.int64) * unit
            read = _readings(
                hidden, residual, vector, rows, lanes < alike, hidden_stride, residual_stride,
                width, has_residual, tile, depth,
            )  # fmt: skip
            if begun == 0:
                position = tl.load(tokens + row * _TOKENS + _POSITION)
                marks = tl.where(marks > position, 0, marks)
                newest = tl.max(marks, axis=0)
                is_last = (marks == newest) & (newest > 0)
                last = tl.max(tl.where(is_last, entries, 0), axis=0)
                if newest > 0:
                    left = tl.max(tl.where(is_last, lefts, -1), axis=0)
                    smoothed = tl.sum(tl.where(is_last, past, 0.0), axis=0)
                begun += 1
            for nth in range(0, alike):
                here = (row + nth).to(tl.int64)
                applies = ids_count == 0
                if ids_count > 0:
                    listed = is_listed(every, ids_count, tl.load(ids + here))
                    applies = listed != ((flags & _OTHER_IDS) != 0)
                x = tl.sum(tl.where(lanes == nth, read, 0.0), axis=0) + bias
                position = tl.load(tokens + here * _TOKENS + _POSITION)
                is_fresh = (position >= fresh) & (newest <= fresh)
                smoothed = tl.where(is_fresh, smoothed_after, smoothed)
                left = tl.where(is_fresh, left_after, left)
                moved = smoothed + weight * (x - smoothed)
                moved = tl.where((weight == 1.0) | (left < 0), x, moved)
                is_open = moved > tl.where(left > 0, closes, opens)
                remaining = tl.where(is_open, 1 + hold, tl.maximum(left - 1, 0))
                smoothed = tl.where(applies, moved, smoothed)
                left = tl.where(applies, remaining, left)
                score = tl.where(left > 1, _OPEN, smoothed)
                if (flags & _STEP) != 0:
                    score = tl.where(left > 0, 1.0, 0.0)
                tl.store(scores + here * slots + slot - 1, score)
                nonfinite = tally + here * _TALLY + _NONFINITE
                tl.store(nonfinite, 1, mask=applies & is_infinite(x))
                last = (last + 1) % kept
                is_new = entries == last
                newest = 1 + position
                marks = tl.where(is_new, newest, marks)
                past = tl.where(is_new, smoothed, past)
                lefts = tl.where(is_new, left, lefts)
        row += alike
    if begun > 0:
        tl.store(place + _STATE_POSITION, marks)
        tl.store(place + _STATE_SCORE, past.to(tl.int32, bitcast=True))
        tl.store(place + _STATE_LEFT, lefts)
