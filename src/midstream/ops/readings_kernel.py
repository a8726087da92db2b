"""Readings of a row on the device: PROBEs of the stream on entry, for every token."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout
from midstream.ops.layout import Flags

_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_PARAMS = tl.constexpr(layout.PARAM_COLUMNS)
_NONFINITE = tl.constexpr(layout.NONFINITE)
_READ = tl.constexpr(layout.READ)
_SLOT = tl.constexpr(layout.SLOT)
_FLAGS = tl.constexpr(layout.FLAGS)
_A = tl.constexpr(layout.A)
_COUNTED = tl.constexpr(int(Flags.COUNTED))
_ADDS = tl.constexpr(int(Flags.ADDS))


@triton.jit
def entered_row(half, rest, inside, has_residual: tl.constexpr):
    """Return the stream on entry. It is loaded at every use, as registers are few."""
    stream = tl.load(half, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        stream += tl.load(rest, mask=inside, other=0.0).to(tl.float32)
    return stream


@triton.jit
def is_infinite(x):
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def read_scores(
    start,
    count,
    totals,
    instructions,
    numbers,
    bank,
    slots,  # the row's scores
    half,
    rest,
    columns,
    inside,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
):
    """Store the scores; return how many counted. They have the bits that any program gives them."""
    # All that is needed is asked of memory before anything waits for it.
    value = tl.load(half, mask=inside, other=0.0)
    other = value
    if has_residual:
        other = tl.load(rest, mask=inside, other=0.0)
    flags, slot, a, vector = _probe(start, instructions, numbers, bank, columns, inside, unit)
    base = value.to(tl.float32)
    if has_residual:
        base += other.to(tl.float32)
    done = tl.full((), 0, tl.int32)
    for at in range(start, start + count):
        x = tl.sum(base * vector, axis=0) + a
        if (flags & _ADDS) != 0:
            x += tl.load(slots + slot - 1)
        tl.store(slots + slot - 1, x)
        tl.store(totals + _NONFINITE, 1, mask=is_infinite(x))
        done += ((flags & _COUNTED) != 0).to(tl.int32)
        if at + 1 < start + count:
            flags, slot, a, vector = _probe(
                at + 1, instructions, numbers, bank, columns, inside, unit
            )
    return done


@triton.jit
def _probe(at, instructions, numbers, bank, columns, inside, unit: tl.constexpr):
    """Return a PROBE's flags, slot, bias and vector."""
    word = instructions + at * _INSTRUCTIONS
    read = tl.load(word + _READ).to(tl.int64) * unit
    flags = tl.load(word + _FLAGS)
    slot = tl.load(word + _SLOT)
    a = tl.load(numbers + at * _PARAMS + _A)
    return flags, slot, a, tl.load(bank + read + columns, mask=inside, other=0.0)
