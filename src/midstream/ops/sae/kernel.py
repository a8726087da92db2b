"""Triton kernels of SAEs' reconstructions: encode, select and change, decode."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout
from midstream.ops.sae import layout as sae_layout

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_KIND = tl.constexpr(layout.KIND)
_READ = tl.constexpr(layout.READ)

_ALIGN = tl.constexpr(sae_layout.ALIGN)
_FEATURES = tl.constexpr(sae_layout.FEATURES)
_TOP_K = tl.constexpr(sae_layout.TOP_K)
_NORMALIZE = tl.constexpr(sae_layout.NORMALIZE)
_CENTERED = tl.constexpr(sae_layout.CENTERED)
_TRANSCODES = tl.constexpr(sae_layout.TRANSCODES)
_SKIPS = tl.constexpr(sae_layout.SKIPS)
_LAYER_NORM = tl.constexpr(sae_layout.LAYER_NORM)
_EPSILON = tl.constexpr(sae_layout.EPSILON)
_LOW = tl.constexpr(sae_layout.LOW)
_PLACES = tl.constexpr(sae_layout.place_of(1, 0))
_ERROR = tl.constexpr(sae_layout.ERROR)
_CHANGES = tl.constexpr(sae_layout.CHANGES)
_DESCRIPTION = tl.constexpr(sae_layout.DESCRIPTION)
_CHANGE = tl.constexpr(sae_layout.CHANGE)
# One more than the bits of the largest float32.
_BEYOND = tl.constexpr(0x7F800000)
_CHANGES_BLOCK = tl.constexpr(256)


@triton.jit
def _described(rows, last, tokens, table, instructions, bank, unit: tl.constexpr):
    """Return the description of each row's CODE, as a pointer, and whether it has one."""
    program = tl.load(tokens + rows * _TOKENS, mask=rows < last, other=0)
    entry = table + program * _TABLE
    kind = tl.load(entry + _KIND, mask=program != 0, other=0)
    has_code = kind < 0
    at = tl.load(entry + _EDIT_START, mask=has_code, other=0) - 1 - kind
    start = tl.load(instructions + at * _INSTRUCTIONS + _READ, mask=has_code, other=0)
    return bank + start.to(tl.int64) * unit, has_code


@triton.jit
def _place_of(described, has_code):
    """Return the place of each row's SAE; −1: it has none."""
    high = tl.load(described, mask=has_code, other=0.0).to(tl.int32)
    low = tl.load(described + _LOW, mask=has_code, other=0.0).to(tl.int32)
    return tl.where(has_code, high * _PLACES + low, -1)


@triton.jit
def _vectors(half, rest, inner, chosen, has_residual: tl.constexpr):
    h = tl.load(half + inner[None, :], mask=chosen, other=0.0).to(tl.float32)
    if has_residual:
        h += tl.load(rest + inner[None, :], mask=chosen, other=0.0).to(tl.float32)
    return h


@triton.jit
def _moments(
    half,
    rest,
    mine,
    centered,
    normalize,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
):
    """Return (mean, scale) of rows, as `midstream.ops.sae.reference` has them, [tile_rows] each."""
    mean = tl.zeros([tile_rows], dtype=tl.float32)
    scale = tl.full([tile_rows], 1.0, tl.float32)
    if (centered != 0) | (normalize == _LAYER_NORM):
        for begin in range(0, width, depth):
            inner = begin + tl.arange(0, depth)
            chosen = mine & (inner < width)[None, :]
            mean += tl.sum(_vectors(half, rest, inner, chosen, has_residual), axis=1)
        mean = mean / width
    if normalize != 0:
        total = tl.zeros([tile_rows], dtype=tl.float32)
        for begin in range(0, width, depth):
            inner = begin + tl.arange(0, depth)
            chosen = mine & (inner < width)[None, :]
            h = _vectors(half, rest, inner, chosen, has_residual)
            h = tl.where(chosen, h - mean[:, None], 0.0)
            total += tl.sum(h * h, axis=1)
        count = tl.where(normalize == _LAYER_NORM, width - 1.0, width * 1.0)
        scale = tl.sqrt_rn(total / count)
    return mean, scale


@triton.jit
def encode_kernel(
    hidden,
    residual,
    tokens,
    table,
    instructions,
    bank,
    weights,
    codes,
    first_row,
    last,
    hidden_stride,
    residual_stride,
    codes_stride,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Write all activations of rows [first_row, last) that have a CODE to `codes`."""
    rows = first_row + tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    described, has_code = _described(rows, last, tokens, table, instructions, bank, unit)
    if tl.max(has_code.to(tl.int32), axis=0) == 0:
        return
    place = _place_of(described, has_code)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    half = hidden + (rows.to(tl.int64) * hidden_stride)[:, None]
    rest = residual + (rows.to(tl.int64) * residual_stride)[:, None] if has_residual else half
    target = codes + ((rows - first_row).to(tl.int64) * codes_stride)[:, None]
    first = tl.max(place, axis=0)
    while first >= 0:
        mine = (place == first)[:, None]
        header = weights + first.to(tl.int64) * _ALIGN
        features = tl.load(header + _FEATURES).to(tl.int32)
        if tl.program_id(1) * tile_columns < features:
            normalize = tl.load(header + _NORMALIZE).to(tl.int32)
            centered = tl.load(header + _CENTERED).to(tl.int32)
            mean, scale = _moments(
                half, rest, mine, centered, normalize, width, has_residual, tile_rows, depth
            )
            scale = tl.where(normalize == _LAYER_NORM, scale + _EPSILON, scale)
            matrix = header + _ALIGN
            inside = (columns < features)[None, :]
            total = tl.zeros([tile_rows, tile_columns], dtype=tl.float32)
            for begin in range(0, width, depth):
                inner = begin + tl.arange(0, depth)
                chosen = mine & (inner < width)[None, :]
                h = _vectors(half, rest, inner, chosen, has_residual)
                h = tl.where(chosen, (h - mean[:, None]) / scale[:, None], 0.0)
                offset = inner.to(tl.int64)[:, None] * features + columns[None, :]
                numbers = tl.load(
                    matrix + offset, mask=(inner < width)[:, None] & inside, other=0.0
                )
                total = tl.dot(h, numbers, total, input_precision=precision)
            bias = matrix + features.to(tl.int64) * width
            total += tl.load(bias + columns, mask=columns < features, other=0.0)[None, :]
            least = tl.load(bias + features + columns, mask=columns < features, other=0.0)
            total = tl.where(total > least[None, :], total, 0.0)
            tl.store(target + columns[None, :], total, mask=mine & inside)
        place = tl.where(place == first, -1, place)
        first = tl.max(place, axis=0)


@triton.jit
def change_kernel(
    tokens,
    table,
    instructions,
    bank,
    weights,
    codes,
    first_row,
    last,
    codes_stride,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    """Keep a TopK SAE's largest activations, then change some; with `ERROR`, leave the changes."""
    row = first_row + tl.program_id(0)
    program = tl.load(tokens + row * _TOKENS)
    kind = tl.load(table + program * _TABLE + _KIND)
    if (program == 0) | (kind >= 0):
        return
    at = tl.load(table + program * _TABLE + _EDIT_START) - 1 - kind
    start = tl.load(instructions + at * _INSTRUCTIONS + _READ)
    described = bank + start.to(tl.int64) * unit
    place = tl.load(described).to(tl.int32) * _PLACES + tl.load(described + _LOW).to(tl.int32)
    header = weights + place.to(tl.int64) * _ALIGN
    features = tl.load(header + _FEATURES).to(tl.int32)
    top_k = tl.load(header + _TOP_K).to(tl.int32)
    is_error = tl.load(described + _ERROR) != 0.0
    count = tl.load(described + _CHANGES).to(tl.int32)
    code = codes + tl.program_id(0).to(tl.int64) * codes_stride
    # Bits of the smallest activation that is kept. Of numbers from 0, the larger has the larger
    # bits: at least k are from `least` on, and fewer from `beyond` on.
    least = tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < features):
        beyond = tl.full((), 0, tl.int32) + _BEYOND
        while beyond - least > 1:
            middle = least + (beyond - least) // 2
            kept_count = tl.full((), 0, tl.int32)
            for begin in range(0, features, block):
                columns = begin + tl.arange(0, block)
                values = tl.load(code + columns, mask=columns < features, other=0.0)
                is_kept = values.to(tl.int32, bitcast=True) >= middle
                kept_count += tl.sum(is_kept.to(tl.int32), axis=0)
            least = tl.where(kept_count >= top_k, middle, least)
            beyond = tl.where(kept_count >= top_k, beyond, middle)
    lanes = tl.arange(0, _CHANGES_BLOCK)
    change = described + _DESCRIPTION + lanes * _CHANGE
    ids = tl.load(change, mask=lanes < count, other=0.0).to(tl.int32)
    old = tl.load(code + ids, mask=lanes < count, other=0.0)
    old = tl.where(old.to(tl.int32, bitcast=True) >= least, old, 0.0)
    new = tl.load(change + 1, mask=lanes < count, other=0.0) * old
    new += tl.load(change + 2, mask=lanes < count, other=0.0)
    new = tl.where(is_error, new - old, new)
    # All threads have read before one writes, and have written before the changes are.
    tl.debug_barrier()
    if (least > 0) | is_error:
        for begin in range(0, features, block):
            columns = begin + tl.arange(0, block)
            values = tl.load(code + columns, mask=columns < features, other=0.0)
            is_kept = (values.to(tl.int32, bitcast=True) >= least) & (is_error == 0)
            tl.store(code + columns, tl.where(is_kept, values, 0.0), mask=columns < features)
        tl.debug_barrier()
    tl.store(code + ids, new, mask=lanes < count)


@triton.jit
def decode_kernel(
    hidden,
    residual,
    tokens,
    table,
    instructions,
    bank,
    weights,
    codes,
    decoded,
    first_row,
    last,
    hidden_stride,
    residual_stride,
    codes_stride,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Write what SAEs make of rows [first_row, last) that have a CODE to `decoded`."""
    rows = first_row + tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    described, has_code = _described(rows, last, tokens, table, instructions, bank, unit)
    if tl.max(has_code.to(tl.int32), axis=0) == 0:
        return
    place = _place_of(described, has_code)
    whole = (tl.load(described + _ERROR, mask=has_code, other=0.0) == 0.0).to(tl.float32)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    half = hidden + (rows.to(tl.int64) * hidden_stride)[:, None]
    rest = residual + (rows.to(tl.int64) * residual_stride)[:, None] if has_residual else half
    source = codes + ((rows - first_row).to(tl.int64) * codes_stride)[:, None]
    target = decoded + (rows.to(tl.int64) * width)[:, None]
    inside = (columns < width)[None, :]
    first = tl.max(place, axis=0)
    while first >= 0:
        mine = (place == first)[:, None]
        header = weights + first.to(tl.int64) * _ALIGN
        features = tl.load(header + _FEATURES).to(tl.int32)
        matrix = header + _ALIGN + features.to(tl.int64) * (width + 2)
        total = tl.zeros([tile_rows, tile_columns], dtype=tl.float32)
        for begin in range(0, features, depth):
            inner = begin + tl.arange(0, depth)
            known = inner < features
            a = tl.load(source + inner[None, :], mask=mine & known[None, :], other=0.0)
            offset = inner.to(tl.int64)[:, None] * width + columns[None, :]
            numbers = tl.load(matrix + offset, mask=known[:, None] & inside, other=0.0)
            total = tl.dot(a, numbers, total, input_precision=precision)
        after = matrix + features.to(tl.int64) * width
        bias = tl.load(after + columns, mask=columns < width, other=0.0)
        total += whole[:, None] * bias[None, :]
        normalize = tl.load(header + _NORMALIZE).to(tl.int32)
        centered = tl.load(header + _CENTERED).to(tl.int32)
        transcodes = tl.load(header + _TRANSCODES) != 0.0
        mean, scale = _moments(
            half, rest, mine, centered, normalize, width, has_residual, tile_rows, depth
        )
        if tl.load(header + _SKIPS) != 0.0:
            skip = after + width
            added = tl.zeros([tile_rows, tile_columns], dtype=tl.float32)
            centre = tl.where(centered != 0, mean, 0.0)
            for begin in range(0, width, depth):
                inner = begin + tl.arange(0, depth)
                chosen = mine & (inner < width)[None, :]
                h = _vectors(half, rest, inner, chosen, has_residual)
                h = tl.where(chosen, h - centre[:, None], 0.0)
                offset = inner[:, None] * width + columns[None, :]
                numbers = tl.load(skip + offset, mask=(inner < width)[:, None] & inside, other=0.0)
                added = tl.dot(h, numbers, added, input_precision=precision)
            total += whole[:, None] * added
        if transcodes == 0:
            total = total * scale[:, None] + (whole * mean)[:, None]
        tl.store(target + columns[None, :], total, mask=mine & inside)
        place = tl.where(place == first, -1, place)
        first = tl.max(place, axis=0)
