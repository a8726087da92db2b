"""Writing of changed rows on the device: `midstream.ops.row_pairs` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def made_row(delta, whole, value, other, has_residual: tl.constexpr):
    """Return the row that a program made of the halves `value` and `other`, what rounding took off
    it, and where it is as it was. `delta` is added to the stream; if `whole`, it is the row.
    """
    entered = value.to(tl.float32)
    added = entered + delta
    row = added
    lost = tl.zeros_like(added)
    if has_residual:
        rest = other.to(tl.float32)
        entered += rest
        row = rest + added
        back = row - rest
        lost = (rest - (row - back)) + (added - back)
    # Selections, not branches: the compiler would keep all values of a branch in registers.
    is_whole = whole != 0
    is_same = (delta == entered) | ((delta != delta) & (entered != entered))
    same = tl.where(is_whole, is_same, delta == 0.0)
    return tl.where(is_whole, delta, row), tl.where(is_whole, 0.0, lost), same


@triton.jit
def store_row(row, lost, same, value, other, half, rest, inside, has_residual: tl.constexpr):
    """Store a row as a high and a low part, or in one tensor; components that are as they were keep
    their bits. Return what `half` and `rest` have then.
    """
    if has_residual:
        high = row.to(other.dtype)
        low = ((row - high.to(tl.float32)) + lost).to(value.dtype)
        high = tl.where(same, other, high)
        low = tl.where(same, value, low)
        tl.store(rest, high, mask=inside)
    else:
        low = tl.where(same, value, row.to(value.dtype))
        high = low
    tl.store(half, low, mask=inside)
    return low, high


@triton.jit
def bounded_row(delta, whole, value, other, limit: tl.constexpr, has_residual: tl.constexpr):
    """Return a row whose changed values are within the limit, or no farther than they were on
    entry; and which values were beyond.
    """
    row, _, same = made_row(delta, whole, value, other, has_residual)
    size = tl.abs(value.to(tl.float32))
    if has_residual:
        size = tl.abs(value.to(tl.float32) + other.to(tl.float32))
    most: tl.constexpr = 65504.0 if other.dtype == tl.float16 else 3.3895e38
    bound = tl.where((size > limit) & (size <= most), size, limit)
    beyond = (same == 0) & ((tl.abs(row) <= bound) == 0)
    held = tl.where(row < 0.0, -bound, tl.where(row > 0.0, bound, 0.0))
    return tl.where(beyond, held, row), beyond
