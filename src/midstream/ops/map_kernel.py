"""Triton kernel of MAPs, which runs before that of the op: one program per tile of products."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_KIND = tl.constexpr(layout.KIND)
_WITH_MAP = tl.constexpr(layout.WITH_MAP)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_READ = tl.constexpr(layout.READ)


@triton.jit
def map_kernel(
    hidden,
    residual,
    tokens,
    table,
    instructions,
    bank,
    mapped,
    num_rows,
    hidden_stride,
    residual_stride,
    mapped_stride,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Write the products of rows whose program has a MAP to `mapped`; most programs have none."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    program = tl.load(tokens + rows * _TOKENS, mask=rows < num_rows, other=0)
    entry = table + program * _TABLE
    kind = tl.load(entry + _KIND, mask=program != 0, other=0)
    if tl.max(kind, axis=0) < _WITH_MAP:
        return
    has_map = kind >= _WITH_MAP
    at = tl.load(entry + _EDIT_START, mask=has_map, other=0) + kind - _WITH_MAP
    # Unit of the bank at which each row's matrix begins; −1: it has none, or is done.
    start = tl.load(instructions + at * _INSTRUCTIONS + _READ, mask=has_map, other=-1)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    of_rows = rows.to(tl.int64)[:, None]
    of_columns = columns.to(tl.int64)[None, :]
    first = tl.max(start, axis=0)
    while first >= 0:
        mine = (start == first)[:, None]
        matrix = bank + first.to(tl.int64) * unit
        total = tl.zeros([tile_rows, tile_columns], dtype=tl.float32)
        for begin in range(0, width, depth):
            inner = begin + tl.arange(0, depth)
            chosen = mine & (inner < width)[None, :]
            half = hidden + of_rows * hidden_stride + inner[None, :]
            h = tl.load(half, mask=chosen, other=0.0).to(tl.float32)
            if has_residual:
                rest = residual + of_rows * residual_stride + inner[None, :]
                h += tl.load(rest, mask=chosen, other=0.0).to(tl.float32)
            inside = (inner < width)[:, None] & (columns < width)[None, :]
            weights = tl.load(matrix + of_columns * width + inner[:, None], mask=inside, other=0.0)
            total = tl.dot(h, weights, total, input_precision=precision)
        target = mapped + of_rows * mapped_stride + of_columns
        tl.store(target, total, mask=mine & (columns < width)[None, :])
        start = tl.where(start == first, -1, start)
        first = tl.max(start, axis=0)
