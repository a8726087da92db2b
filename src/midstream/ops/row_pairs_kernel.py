"""Writing of changed rows on the device: `midstream.ops.row_pairs` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def made_row(delta, whole, value, other, has_residual: tl.constexpr):
    """Return the row that a program made of the halves `value` and `other`, what rounding took off
    it, and where it is as it was. `delta` is the row if `whole`, else what is added to the stream;
    `whole` is None where it never is the row.
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
        lost = added - back
        if other.dtype == tl.float32:
            # What is missing where `added` is the larger. Half precision is rounded by more.
            lost += rest - (row - back)
    same = delta == 0.0
    if whole is not None:
        # Selections, not branches: the compiler would keep all values of a branch in registers.
        is_whole = whole != 0
        is_same = (delta == entered) | ((delta != delta) & (entered != entered))
        same = tl.where(is_whole, is_same, same)
        row = tl.where(is_whole, delta, row)
        lost = tl.where(is_whole, 0.0, lost)
    return row, lost, same


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
def bounded_row(row, lost, same, value, other, limit: tl.constexpr, has_residual: tl.constexpr):
    """Return a row within the limit, or, in float16, no farther than it was on entry; what rounding
    took off it; and where a changed value was beyond the limit, or any value is not finite. There
    is no branch for the rare case, as it would keep all values of a row in registers.
    """
    if other.dtype == tl.float16:
        size = tl.abs(value.to(tl.float32))
        if has_residual:
            size = tl.abs(value.to(tl.float32) + other.to(tl.float32))
        bound = tl.where((size > limit) & (size <= 65504.0), size, limit)
        held = tl.minimum(tl.maximum(row, -bound), bound)
    else:
        held = tl.minimum(tl.maximum(row, -limit), limit)
    beyond = held != row
    lost = tl.where(beyond, 0.0, lost)
    spoiled = beyond & ((same == 0) | ((tl.abs(row) < float("inf")) == 0))
    return tl.where(row == row, held, 0.0), lost, spoiled
