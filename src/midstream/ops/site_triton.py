"""Triton kernel of the `site` op: one program per token, which exits after one load if idle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags, Op

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TALLY = tl.constexpr(layout.TALLY_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_PARAMS = tl.constexpr(layout.PARAM_COLUMNS)
_GROUP = tl.constexpr(layout.GROUP)
_RECORD = tl.constexpr(layout.RECORD)
_POSITION = tl.constexpr(layout.POSITION)
_EDITS = tl.constexpr(layout.EDITS)
_CAPTURES = tl.constexpr(layout.CAPTURES)
_NONFINITE = tl.constexpr(layout.NONFINITE)
_FIRST = tl.constexpr(layout.FIRST)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_EDIT_COUNT = tl.constexpr(layout.EDIT_COUNT)
_PLACE = tl.constexpr(layout.PLACE)
_CODE = tl.constexpr(layout.CODE)
_PLAIN = tl.constexpr(layout.PLAIN)

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

_FRESH = tl.constexpr(int(Flags.FRESH))
_GATED = tl.constexpr(int(Flags.GATED))
_KEEP = tl.constexpr(int(Flags.KEEP))
_COUNTED = tl.constexpr(int(Flags.COUNTED))
_ROW_BY_POSITION = tl.constexpr(int(Flags.ROW_BY_POSITION))
_STEP = tl.constexpr(int(Flags.STEP))
_OTHER_IDS = tl.constexpr(int(Flags.OTHER_IDS))

_ADD_MATCHED = tl.constexpr(int(Op.ADD_MATCHED))
_CLIP = tl.constexpr(int(Op.CLIP))
_LINEAR = tl.constexpr(int(Op.LINEAR))
_FEATURE = tl.constexpr(int(Op.FEATURE))
_REPLACE = tl.constexpr(int(Op.REPLACE))
_SCALE = tl.constexpr(int(Op.SCALE))
_GATE = tl.constexpr(int(Op.GATE))
_PROBE = tl.constexpr(int(Op.PROBE))

MAX_WIDTH = 32768  # a row is one block, in registers

# Limits within which programmatic dependent launch is faster: it hides the gap between launches of
# kernels that take about as long as the gap, and is slower for many programs or short gaps.
DEPENDENT_MAX_ROWS = 16
DEPENDENT_MIN_WIDTH = 2048
DEPENDENT_MIN_CAPABILITY = 9
# The intrinsics do not compile in Triton 3.4.
DEPENDENT_MIN_TRITON = (3, 5)
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# Most registers of a thread, for streams of half precision: four programs of a row of 4096 then run
# on one multiprocessor at a time. The rarer instructions keep in memory what does not fit.
MAX_REGISTERS = 64

_IDS_BLOCK = tl.constexpr(128)
_NEIGHBOURS = tl.constexpr(8)  # values of a row that are in the same thread


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stream(value, rest, inside, has_residual: tl.constexpr):
    """Return the stream: `value` plus the residual at `rest`."""
    stream = value.to(tl.float32)
    if has_residual:
        stream += tl.load(rest, mask=inside, other=0.0).to(tl.float32)
    return stream


@triton.jit
def _entered(half, rest, inside, has_residual: tl.constexpr):
    """Return the stream on entry. It is loaded at every use, as registers are few."""
    return _stream(tl.load(half, mask=inside, other=0.0), rest, inside, has_residual)


@triton.jit
def _is_listed(lists, count, token):
    """Return whether `token` is one of the first `count` ids of `lists`."""
    lanes = tl.arange(0, _IDS_BLOCK)
    hits = tl.zeros([_IDS_BLOCK], dtype=tl.int32)
    for first in range(0, count, _IDS_BLOCK):
        inside = first + lanes < count
        each = tl.load(lists + first + lanes, mask=inside, other=0)
        hits += (inside & (each == token)).to(tl.int32)
    return tl.sum(hits, axis=0) > 0


@triton.jit
def _is_reading(op, slot):
    """Return whether an instruction reads ⟨h, read⟩."""
    gate = (op == _GATE) & (slot == 0)
    return ((op >= _CLIP) & (op <= _FEATURE)) | gate | (op == _PROBE)


@triton.jit
def _factor(op, x, param):
    """Return f before gating, for additive ops except ADD_MATCHED; `x` is ⟨h, read⟩."""
    a = tl.load(param + _A)
    b = tl.load(param + _B)
    c = tl.load(param + _C)
    factor = a
    if op == _CLIP:
        factor = c * (tl.minimum(tl.maximum(x, a), b) - x)
    elif op == _LINEAR:
        factor = a * (x + b)
    elif op == _FEATURE:
        x += a
        factor = c * tl.where(x > b, x, 0.0) + tl.load(param + _D)
    elif op == _SCALE:
        factor = a - 1.0
    return factor


@triton.jit
def _is_infinite(x):
    """Return whether x is infinite or NaN."""
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def _any_infinite(x, block: tl.constexpr):
    """Return 1 if a value of a row is infinite or NaN, else 0.

    The larger of two magnitudes has the larger bits, and halves are compared two at a time.
    """
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    half: tl.constexpr = 0x7C00 if x.dtype == tl.float16 else 0x7F80
    infinite: tl.constexpr = 0x7F800000 if x.dtype == tl.float32 else half
    peak = tl.reduce(tl.reshape(bits, [block // _NEIGHBOURS, _NEIGHBOURS]), 1, _larger)
    return tl.max((peak >= infinite).to(tl.int32), axis=0)


@triton.jit
def _any_beyond(x, limit: tl.constexpr, block: tl.constexpr):
    """Return 1 if a magnitude of a float32 row is more than `limit`, or NaN; else 0."""
    peak = tl.reduce(tl.reshape(tl.abs(x), [block // _NEIGHBOURS, _NEIGHBOURS]), 1, _larger)
    return tl.max(((peak <= limit) == 0).to(tl.int32), axis=0)


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0.0, 1.0, small), 1.0 + small)


@triton.jit
def _product(at, instructions, numbers, bank, columns, inside, width: tl.constexpr):
    """Return what a plain addition adds, and 1 if it counts, else 0."""
    word = instructions + at * _INSTRUCTIONS
    write = tl.load(word + _WRITE).to(tl.int64) * width
    factor = tl.load(numbers + at * _PARAMS + _A)
    flags = tl.load(word + _FLAGS)
    added = tl.zeros([columns.shape[0]], dtype=tl.float32)
    if factor != 0.0:
        added = factor * tl.load(bank + write + columns, mask=inside, other=0.0)
    return added, ((flags & _COUNTED) != 0).to(tl.int32)


@triton.jit
def _run(
    start,
    count,
    row,
    token,
    ids,
    totals,
    instructions,
    numbers,
    lists,
    bank,
    slots,  # the row's scores
    half,
    rest,
    columns,
    inside,
    width: tl.constexpr,
    has_residual: tl.constexpr,
):
    """Run instructions of any kind; return the sum of what they add, and how many counted."""
    delta = tl.zeros([columns.shape[0]], dtype=tl.float32)
    base = _entered(half, rest, inside, has_residual)
    gate = tl.full((), 1.0, tl.float32)
    done = tl.full((), 0, tl.int32)
    for at in range(start, start + count):
        word = instructions + at * _INSTRUCTIONS
        param = numbers + at * _PARAMS
        op = tl.load(word + _OP)
        flags = tl.load(word + _FLAGS)
        slot = tl.load(word + _SLOT)
        ids_count = tl.load(word + _IDS_COUNT)
        a = tl.load(param + _A)
        applies = ids_count == 0
        if ids_count > 0:
            first = tl.load(word + _IDS_START)
            listed = _is_listed(lists + first, ids_count, tl.load(ids + row))
            applies = listed != ((flags & _OTHER_IDS) != 0)
        if applies:
            if ((flags & _FRESH) != 0) & (at != start):
                base = _entered(half, rest, inside, has_residual) + delta
            x = tl.full((), 0.0, tl.float32)
            if _is_reading(op, slot):
                read = tl.load(word + _READ).to(tl.int64) * width
                vector = tl.load(bank + read + columns, mask=inside, other=0.0)
                x = tl.sum(base * vector, axis=0)
            if op < _GATE:
                if op == _ADD_MATCHED:
                    factor = a * tl.sqrt_rn(tl.sum(base * base, axis=0))
                else:
                    factor = _factor(op, x, param)
                if (flags & _GATED) != 0:
                    factor = tl.where(gate == 0.0, 0.0, factor * gate)
                if factor != 0.0:
                    # The product is rounded separately (the launch disables fused
                    # multiply-add), so that +v and −v cancel exactly.
                    if op == _SCALE:
                        delta = delta + factor * base
                    else:
                        write = tl.load(word + _WRITE)
                        if (flags & _ROW_BY_POSITION) != 0:
                            write += tl.load(token + _POSITION)
                        start_of = write.to(tl.int64) * width
                        vector = tl.load(bank + start_of + columns, mask=inside, other=0.0)
                        if op == _REPLACE:
                            vector = vector - base
                        delta = delta + factor * vector
                if (flags & _KEEP) != 0:
                    stream = _entered(half, rest, inside, has_residual) + delta
                    # One reduction for both norms: bit-identical for equal rows.
                    old, new = tl.reduce((base * base, stream * stream), 0, _add_pairs)
                    old = tl.sqrt_rn(old)
                    new = tl.sqrt_rn(new)
                    if (new != 0.0) & (old != new):
                        # Not an addition to delta: where delta is large, its last digit may be
                        # larger than h.
                        entered = _entered(half, rest, inside, has_residual)
                        delta = (entered + delta) * tl.div_rn(old, new) - entered
            elif op == _GATE:
                x += a
                if slot > 0:
                    x = tl.load(slots + slot - 1)
                b = tl.load(param + _B)
                c = tl.load(param + _C)
                gate = _sigmoid(c * (x - b))
                if (flags & _STEP) != 0:
                    gate = tl.where(x > b, 1.0, 0.0)
            elif slot > 0:
                x += a
                tl.store(slots + slot - 1, x)
                tl.store(totals + _NONFINITE, 1, mask=_is_infinite(x))
            done += ((flags & _COUNTED) != 0).to(tl.int32)
    return delta, done


@triton.jit
def _site_kernel(
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
    ring,
    hidden_stride,
    residual_stride,
    slots,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    limit: tl.constexpr,
    dependent: tl.constexpr,
):
    if dependent:
        # Reads must wait for the preceding kernels; the next kernel may be queued.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    token = tokens + row * _TOKENS
    program = tl.load(token)
    if program == 0:
        return
    totals = tally + row * _TALLY
    row = row.to(tl.int64)
    group = tl.load(token + _GROUP)
    record = tl.load(token + _RECORD)
    signature = tl.load(totals)
    edits = tl.load(totals + _EDITS)
    captures = tl.load(totals + _CAPTURES)
    start = tl.load(table + program * _TABLE + _EDIT_START)
    count = tl.load(table + program * _TABLE + _EDIT_COUNT)
    plain = tl.load(table + program * _TABLE + _PLAIN)
    place = tl.load(table + group * _TABLE + _PLACE)
    first = tl.load(table + _FIRST)
    code = tl.load(table + _CODE)
    captured = (record > 0) & (place > 0) & (first >= 0)
    # Plain stores suffice: one program owns a token, and sites run in stream order.
    tl.store(totals, signature + code)
    tl.store(totals + _CAPTURES, captures + captured.to(tl.int32))

    if (count > 0) | captured:
        columns = tl.arange(0, block)
        inside = columns < width
        half = hidden + row * hidden_stride + columns
        rest = columns
        if has_residual:
            rest = residual + row * residual_stride + columns
        if count > 0:
            if plain != 0:
                value = tl.load(half, mask=inside, other=0.0)
                delta, done = _product(start, instructions, numbers, bank, columns, inside, width)
                for at in range(start + 1, start + count):
                    added, one = _product(at, instructions, numbers, bank, columns, inside, width)
                    delta = delta + added
                    done += one
            else:
                delta, done = _run(
                    start, count, row, token, ids, totals, instructions, numbers, lists, bank,
                    scores + row * slots, half, rest, columns, inside, width, has_residual,
                )  # fmt: skip
                value = tl.load(half, mask=inside, other=0.0)
            tl.store(totals + _EDITS, edits + done)
            entered = value.to(tl.float32)
            changed = tl.where(delta == 0.0, entered, entered + delta)
            edited = changed.to(value.dtype)
            tl.store(half, edited, mask=inside)
            # Values within the limit are stored by now. Others are rare, and are stored again.
            beyond_limit = _any_beyond(changed, limit, block)
            if beyond_limit != 0:
                # Times 1: otherwise the compiler keeps the sums above in registers until here.
                delta *= beyond_limit.to(tl.float32)
                changed = value.to(tl.float32) + delta
                beyond = (delta != 0.0) & ((tl.abs(changed) <= limit) == 0)
                held = tl.where(changed < 0.0, -limit, tl.where(changed > 0.0, limit, 0.0))
                changed = tl.where(beyond, held, changed)
                edited = tl.where(delta == 0.0, value, changed.to(value.dtype))
                tl.store(half, edited, mask=inside)
                spoiled = (inside & (beyond | _is_infinite(edited))).to(tl.int32)
                tl.store(totals + _NONFINITE, 1, mask=tl.max(spoiled, axis=0) != 0)
        else:
            edited = tl.load(half, mask=inside, other=0.0)
        if captured:
            copied = _stream(edited, rest, inside, has_residual).to(ring.dtype.element_ty)
            target = (first + record - 1 + place - 1).to(tl.int64) * width
            tl.store(ring + target + columns, copied, mask=inside)
            tl.store(totals + _NONFINITE, 1, mask=_any_infinite(copied, block) != 0)


def site_triton(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    ids: Tensor,
    tally: Tensor,
    table: Tensor,
    instructions: Tensor,
    params: Tensor,
    lists: Tensor,
    bank: Tensor,
    scores: Tensor,
    ring: Tensor,
) -> None:
    """Launch the kernel; see `midstream.ops.site_ref.site_ref`, which has the same arguments.

    Raises:
        ValueError: rows are wider than `MAX_WIDTH`.
    """
    num_rows, width = hidden.shape
    if width > MAX_WIDTH:
        raise ValueError(f"hidden must be at most {MAX_WIDTH} wide on a GPU, got {width}")
    if num_rows == 0:
        return
    device = hidden.device
    has_residual = residual is not None
    rest = hidden if residual is None else residual
    tensors = (
        hidden, residual, tokens, ids, tally, table, instructions, params, lists, bank, scores, ring
    )  # fmt: skip
    strides = hidden.stride(0), rest.stride(0), scores.shape[1]
    dependent = _dependent_launch(num_rows, width, device)
    dtypes = hidden.dtype, rest.dtype, ring.dtype
    kind = device, dtypes, width, has_residual, strides, dependent
    is_aligned = not reduce(or_, [each.data_ptr() for each in tensors if each is not None]) % 16
    kernel = _KERNELS.get(kind) if is_aligned else None
    options = _launch_options(width, hidden.dtype, dependent)
    with _current(device):
        if kernel is not None:
            constants = width, has_residual, options["block"], options["limit"], dependent
            kernel[(num_rows, 1, 1)](*tensors, *strides, *constants)
            return
        kernel = _site_kernel[(num_rows,)](*tensors, *strides, has_residual=has_residual, **options)
        if is_aligned and torch.version.hip is None and kernel is not None:
            _KERNELS[kind] = kernel


# Compiled kernels by all that they depend on, for tensors that are aligned to 16 bytes. Triton
# itself looks a kernel up by each argument and compares each global variable at each launch, which
# takes several times as long as the launch. On HIP, a kernel also depends on the sizes of tensors.
_KERNELS: dict[tuple[object, ...], Any] = {}


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device current. It does nothing if the device is current, as
    entering `torch.cuda.device` takes time at each launch.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = nullcontext()


@cache
def _launch_options(
    width: int, dtype: torch.dtype, dependent: bool
) -> dict[str, int | float | bool]:
    """Return the constants of the kernel and the options of its launch: the same at every site of a
    model, so that a forward pass without a CUDA graph computes them once.
    """
    block = max(triton.next_power_of_2(width), _NEIGHBOURS.value)
    options: dict[str, int | float | bool] = {
        "width": width,
        "block": block,
        "limit": layout.limit_of(str(dtype).removeprefix("torch.")),
        "dependent": dependent,
        # A thread has 16 values of a wide row.
        "num_warps": min(max(block // 512, 4), 32),
        "enable_fp_fusion": False,
    }
    # Only CUDA devices know these.
    if dtype.itemsize == 2 and torch.version.hip is None:
        options["maxnreg"] = MAX_REGISTERS
    if dependent:
        options["launch_pdl"] = True
    return options


def _dependent_launch(num_rows: int, width: int, device: torch.device) -> bool:
    """Return whether to launch before the preceding kernel ends (dependent launch)."""
    return (
        num_rows <= DEPENDENT_MAX_ROWS
        and width >= DEPENDENT_MIN_WIDTH
        and _capability(device) >= DEPENDENT_MIN_CAPABILITY
        and _TRITON >= DEPENDENT_MIN_TRITON
    )


@cache
def _capability(device: torch.device) -> int:
    """Return the device's major CUDA compute capability; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]
