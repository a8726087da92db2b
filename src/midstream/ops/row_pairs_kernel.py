"""Writing of changed rows on the device: `midstream.ops.row_pairs` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout

_NONFINITE = tl.constexpr(layout.NONFINITE)
NEIGHBOURS = tl.constexpr(8)  # values of a row that are in the same thread


@triton.jit
def widened(half):
    """Return values of the model in float32. A bfloat16's bits are taken as the upper half of a
    float32's, not by a conversion: this lets the compiler round the values of a row two at a time.
    """
    if half.dtype == tl.bfloat16:
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = half.to(tl.float32)
    return wide


@triton.jit
def nothing(row):
    """Return −0 everywhere: added to a value it changes nothing, not even the sign of a zero."""
    return tl.full(row.shape, -0.0, tl.float32)


@triton.jit
def summed_row(delta, value, other, has_residual: tl.constexpr):
    """Return the halves' and `delta`'s sum, what rounding took off it, where it is as before."""
    added = widened(value) + delta
    row = added
    lost = nothing(added)
    if has_residual:
        rest = widened(other)
        row = rest + added
        back = row - rest
        lost = added - back
        if other.dtype == tl.float32:
            # What is missing where `added` is the larger. Half precision is rounded by more.
            lost += rest - (row - back)
    return row, lost, delta == 0.0


@triton.jit
def is_entered(row, value, other, has_residual: tl.constexpr):
    """Return where a row is the sum of the halves `value` and `other`, to the last bit."""
    entered = widened(value)
    if has_residual:
        entered += widened(other)
    return row.to(tl.int32, bitcast=True) == entered.to(tl.int32, bitcast=True)


@triton.jit
def store_row(row, lost, same, value, other, half, rest, inside, has_residual: tl.constexpr):
    """Store a row whole or as two parts; equal components keep their bits. Return the parts."""
    high = tl.where(same, widened(other), row).to(other.dtype)
    low = high
    if has_residual:
        short = (row - high.to(tl.float32)) + lost
        low = tl.where(same, widened(value), short).to(value.dtype)
        tl.store(rest, high, mask=inside)
    tl.store(half, low, mask=inside)
    return low, high


@triton.jit
def bounded_row(row, lost, same, value, other, limit: tl.constexpr, has_residual: tl.constexpr):
    """Return a row within the limit, or, in float16, no farther than it was on entry; what rounding
    took off it; and where a changed value was beyond the limit, or any value is not finite. There
    is no branch for the rare case, as it would keep all values of a row in registers.
    """
    if other.dtype == tl.float16:
        size = tl.abs(widened(value))
        if has_residual:
            size = tl.abs(widened(value) + widened(other))
        bound = tl.where((size > limit) & (size <= 65504.0), size, limit)
        held = tl.minimum(tl.maximum(row, -bound), bound)
    else:
        held = tl.minimum(tl.maximum(row, -limit), limit)
    beyond = held != row
    lost = tl.where(beyond, -0.0, lost)
    spoiled = beyond & ((same == 0) | ((row - row) != 0.0))
    return tl.where(row == row, held, 0.0), lost, spoiled


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def any_infinite(x, block: tl.constexpr):
    """Return 1 if a value of a row is infinite or NaN, else 0, by bits, two at a time."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    half: tl.constexpr = 0x7C00 if x.dtype == tl.float16 else 0x7F80
    infinite: tl.constexpr = 0x7F800000 if x.dtype == tl.float32 else half
    peak = tl.reduce(tl.reshape(bits, [block // NEIGHBOURS, NEIGHBOURS]), 1, _larger)
    return tl.max((peak >= infinite).to(tl.int32), axis=0)


@triton.jit
def write_row(
    row,
    lost,
    same,
    value,
    other,
    half,
    rest,
    target,
    captured,
    totals,
    inside,
    limit: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    """Store a row that a program made, and copy it to `target` if it is captured."""
    made, lost, spoiled = bounded_row(row, lost, same, value, other, limit, has_residual)
    low, high = store_row(made, lost, same, value, other, half, rest, inside, has_residual)
    spoiled = tl.reshape(spoiled, [block // NEIGHBOURS, NEIGHBOURS])
    spoiled = tl.reduce(spoiled, 1, _either)
    # Each thread flags its own values: a reduction would make all threads wait.
    flags = totals + _NONFINITE + tl.zeros_like(spoiled.to(tl.int32))
    tl.store(flags, 1, mask=spoiled)
    if captured:
        _copy(low, high, target, totals, inside, has_residual, block)


@triton.jit
def _copy(low, high, target, totals, inside, has_residual: tl.constexpr, block: tl.constexpr):
    """Copy a row, the sum of two parts, to `target`."""
    copied = low.to(tl.float32)
    if has_residual:
        copied += high.to(tl.float32)
    copied = copied.to(target.dtype.element_ty)
    tl.store(target, copied, mask=inside)
    tl.store(totals + _NONFINITE, 1, mask=any_infinite(copied, block) != 0)
