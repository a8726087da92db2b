"""Triton kernel of SCANs: one program for each state, which exits early if it has no row here."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.readings_kernel import is_infinite
from midstream.ops.site_kernel import is_listed

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_PARAMS = tl.constexpr(layout.PARAM_COLUMNS)
_IDS = tl.constexpr(layout.ID_COLUMNS)
_SCANS = tl.constexpr(layout.SCAN_COLUMNS)
_STATES = tl.constexpr(layout.STATE_COLUMNS)
_POSITION = tl.constexpr(layout.POSITION)
_NONFINITE = tl.constexpr(layout.NONFINITE)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_EDIT_COUNT = tl.constexpr(layout.EDIT_COUNT)
_CODE = tl.constexpr(layout.CODE)
_SCAN_ROW = tl.constexpr(layout.SCAN_ROW)
_SCAN_COUNT = tl.constexpr(layout.SCAN_COUNT)
_SCAN_SLOT = tl.constexpr(layout.SCAN_SLOT)
_SCAN_SITE = tl.constexpr(layout.SCAN_SITE)
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
_STEPS_BLOCK = tl.constexpr(32)


@triton.jit
def _find(table, instructions, program, slot):
    """Return the number of the SCAN with a slot in a program at this site; −1: there is none."""
    start = tl.load(table + program * _TABLE + _EDIT_START)
    stop = start + tl.load(table + program * _TABLE + _EDIT_COUNT)
    lanes = tl.arange(0, _STEPS_BLOCK)
    instruction = tl.full((), -1, tl.int32)
    for first in range(start, stop, _STEPS_BLOCK):
        at = first + lanes
        word = instructions + at * _INSTRUCTIONS
        op = tl.load(word + _OP, mask=at < stop, other=-1)
        of_slot = tl.load(word + _SLOT, mask=at < stop, other=0)
        is_one = (op == _SCAN) & (of_slot == slot)
        instruction = tl.maximum(instruction, tl.max(tl.where(is_one, at, -1), axis=0))
    return instruction


@triton.jit
def _reading(
    hidden,
    residual,
    vector,
    row,
    hidden_stride,
    residual_stride,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    """Return ⟨h, read⟩ of one row, h the stream on entry. No load waits for another."""
    columns = tl.arange(0, block)
    inside = columns < width
    row = row.to(tl.int64)
    h = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        rest = residual + row * residual_stride + columns
        h += tl.load(rest, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(h * tl.load(vector + columns, mask=inside, other=0.0), axis=0)


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
    tally_stride,
    slots,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    kept: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    block: tl.constexpr,
):
    """Go over the rows of one request for one slot, in order, a tile at a time."""
    state = tl.program_id(0)
    scan = scans + state * _SCANS
    count = tl.load(scan + _SCAN_COUNT)
    site = tl.load(scan + _SCAN_SITE)
    code = tl.load(table + _CODE)
    if (count == 0) | (site != code):
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
    left = tl.full((), -1, tl.int32)
    smoothed = tl.full((), 0.0, tl.float32)
    while row < stop:
        rows = row + lanes
        program = tl.load(tokens + row * _TOKENS)
        programs = tl.load(tokens + rows * _TOKENS, mask=rows < stop, other=-1)
        alike = tl.min(tl.where(programs == program, tile, lanes), axis=0)
        instruction = _find(table, instructions, program, slot)
        if instruction >= 0:
            word = instructions + instruction * _INSTRUCTIONS
            param = numbers + instruction * _PARAMS
            flags = tl.load(word + _FLAGS)
            hold = tl.load(word + _WRITE)
            ids_count = tl.load(word + _IDS_COUNT)
            listed_from = tl.load(word + _IDS_START)
            bias = tl.load(param + _A)
            opens = tl.load(param + _B)
            closes = tl.load(param + _C)
            weight = tl.load(param + _D)
            vector = bank + tl.load(word + _READ).to(tl.int64) * unit
            positions = tl.load(tokens + rows * _TOKENS + _POSITION, mask=lanes < alike, other=0)
            if count == 1:
                reading = _reading(
                    hidden, residual, vector, row, hidden_stride, residual_stride,
                    width, has_residual, block,
                )  # fmt: skip
                read = tl.where(lanes == 0, reading, 0.0)
            else:
                read = _readings(
                    hidden, residual, vector, rows, lanes < alike, hidden_stride,
                    residual_stride, width, has_residual, tile, depth,
                )  # fmt: skip
            read += bias
            applied = tl.full([tile], 1, tl.int32)
            if ids_count != 0:
                applied = tl.zeros([tile], dtype=tl.int32)
                for lane in range(0, alike):
                    token = ids + (row + lane) * _IDS
                    listed = is_listed(lists, listed_from, ids_count, token)
                    applies = (listed != ((flags & _OTHER_IDS) != 0)).to(tl.int32)
                    applied = tl.where(lanes == lane, applies, applied)
            made = tl.zeros([tile], dtype=tl.float32)
            made_smoothed = tl.zeros([tile], dtype=tl.float32)
            made_left = tl.zeros([tile], dtype=tl.int32)
            if begun == 0:
                position = tl.sum(tl.where(lanes == 0, positions, 0), axis=0)
                marks = tl.where(marks > position, 0, marks)
                newest = tl.max(marks, axis=0)
                is_last = (marks == newest) & (newest > 0)
                last = tl.max(tl.where(is_last, entries, 0), axis=0)
                left = tl.max(tl.where(is_last, lefts, -1), axis=0)
                smoothed = tl.sum(tl.where(is_last, past, 0.0), axis=0)
                begun += 1
            for lane in range(0, alike):
                is_nth = lanes == lane
                x = tl.sum(tl.where(is_nth, read, 0.0), axis=0)
                position = tl.sum(tl.where(is_nth, positions, 0), axis=0)
                applies = tl.sum(tl.where(is_nth, applied, 0), axis=0) != 0
                moved = smoothed + weight * (x - smoothed)
                moved = tl.where((weight == 1.0) | (left < 0), x, moved)
                is_open = moved > tl.where(left > 0, closes, opens)
                remaining = tl.where(is_open, 1 + hold, tl.maximum(left - 1, 0))
                smoothed = tl.where(applies, moved, smoothed)
                left = tl.where(applies, remaining, left)
                score = smoothed
                if (flags & _STEP) != 0:
                    score = tl.where(left > 0, 1.0, 0.0)
                made = tl.where(is_nth, score, made)
                made_smoothed = tl.where(is_nth, smoothed, made_smoothed)
                made_left = tl.where(is_nth, left, made_left)
                last = (last + 1) % kept
                is_new = entries == last
                marks = tl.where(is_new, 1 + position, marks)
                past = tl.where(is_new, smoothed, past)
                lefts = tl.where(is_new, left, lefts)
            inside = lanes < alike
            of_rows = rows.to(tl.int64)
            mine = scores + of_rows * slots
            tl.store(mine + slot - 1, made, mask=inside)
            # The last columns are of the states, two each.
            pair = mine + slots - 2 * (tl.num_programs(0) - state)
            tl.store(pair, made_smoothed, mask=inside)
            tl.store(pair + 1, made_left.to(tl.float32, bitcast=True), mask=inside)
            spoiled = inside & (applied != 0) & is_infinite(read)
            tl.store(tally + of_rows * tally_stride + _NONFINITE, 1, mask=spoiled)
        row += alike
    if begun > 0:
        tl.store(place + _STATE_POSITION, marks)
        tl.store(place + _STATE_SCORE, past.to(tl.int32, bitcast=True))
        tl.store(place + _STATE_LEFT, lefts)
