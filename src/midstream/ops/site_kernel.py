"""Triton kernel of the `site` op: one program per token, which exits after one load if idle."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout
from midstream.ops.activations.kernel import activated, sigmoid
from midstream.ops.layout import Flags, Op
from midstream.ops.readings_kernel import entered_row, is_infinite, read_scores
from midstream.ops.row_pairs_kernel import any_infinite, is_entered, nothing, summed_row, write_row

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_INSTRUCTIONS = tl.constexpr(layout.INSTRUCTION_COLUMNS)
_PARAMS = tl.constexpr(layout.PARAM_COLUMNS)
_IDS = tl.constexpr(layout.ID_COLUMNS)
_SELECTED = tl.constexpr(layout.SELECTED)
_BY_BIT = tl.constexpr(layout.BY_BIT)
_GROUP = tl.constexpr(layout.GROUP)
_RECORD = tl.constexpr(layout.RECORD)
_POSITION = tl.constexpr(layout.POSITION)
_EDITS = tl.constexpr(layout.EDITS)
_CAPTURES = tl.constexpr(layout.CAPTURES)
_NONFINITE = tl.constexpr(layout.NONFINITE)
_DOSES = tl.constexpr(layout.DOSES)
_NO_CHANGE = tl.constexpr(layout.NO_CHANGE)
_FIRST = tl.constexpr(layout.FIRST)
_EDIT_START = tl.constexpr(layout.EDIT_START)
_EDIT_COUNT = tl.constexpr(layout.EDIT_COUNT)
_PLACE = tl.constexpr(layout.PLACE)
_CODE = tl.constexpr(layout.CODE)
_KIND = tl.constexpr(layout.KIND)
_PLAIN = tl.constexpr(layout.PLAIN)
_READS = tl.constexpr(layout.READS)

_OP = tl.constexpr(layout.OP)
_READ = tl.constexpr(layout.READ)
_WRITE = tl.constexpr(layout.WRITE)
_SLOT = tl.constexpr(layout.SLOT)
_FLAGS = tl.constexpr(layout.FLAGS)
_IDS_START = tl.constexpr(layout.IDS_START)
_IDS_COUNT = tl.constexpr(layout.IDS_COUNT)
_MASK = tl.constexpr(layout.MASK)
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
_ADDS = tl.constexpr(int(Flags.ADDS))
_UNITS = tl.constexpr(int(Flags.UNITS))

_ADD_MATCHED = tl.constexpr(int(Op.ADD_MATCHED))
_CLIP = tl.constexpr(int(Op.CLIP))
_LINEAR = tl.constexpr(int(Op.LINEAR))
_FEATURE = tl.constexpr(int(Op.FEATURE))
_REPLACE = tl.constexpr(int(Op.REPLACE))
_SCALE = tl.constexpr(int(Op.SCALE))
_MULTIPLY = tl.constexpr(int(Op.MULTIPLY))
_RAISE = tl.constexpr(int(Op.RAISE))
_MAP = tl.constexpr(int(Op.MAP))
_RECONSTRUCT = tl.constexpr(int(Op.RECONSTRUCT))
_GATE = tl.constexpr(int(Op.GATE))
_PROBE = tl.constexpr(int(Op.PROBE))
_UNIT = tl.constexpr(int(Op.UNIT))

_IDS_BLOCK = tl.constexpr(128)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _now(delta, whole, half, rest, inside, has_residual: tl.constexpr):
    """Return the stream: `delta` is added to it, or is the whole of it."""
    return tl.where(whole != 0, delta, entered_row(half, rest, inside, has_residual) + delta)


@triton.jit
def is_listed(lists, first, count, place):
    """Return whether the token at a place of `ids` is one of `count` ids of `lists` from `first`
    on, or by bit, whether it has the bit of number `first`.
    """
    by_bit = count == _BY_BIT
    bit = (tl.load(place + _SELECTED) >> tl.where(by_bit, first, 0)) & 1
    token = tl.load(place)
    lists += first
    lanes = tl.arange(0, _IDS_BLOCK)
    hits = tl.zeros([_IDS_BLOCK], dtype=tl.int32)
    for first in range(0, count, _IDS_BLOCK):
        inside = first + lanes < count
        listed_ids = tl.load(lists + first + lanes, mask=inside, other=0)
        hits += (inside & (listed_ids == token)).to(tl.int32)
    return (tl.sum(hits, axis=0) > 0) | (by_bit & (bit != 0))


@triton.jit
def _masked(values, mask, bank, columns, inside, unit: tl.constexpr):
    """Return values with zero where the mask at unit `mask` − 1, loaded at every use, is zero."""
    if mask > 0:
        values = tl.where(_is_chosen(mask, bank, columns, inside, unit), values, 0.0)
    return values


@triton.jit
def _is_chosen(mask, bank, columns, inside, unit: tl.constexpr):
    """Return where the mask is not zero. `mask` is 1 + its unit."""
    start = (mask - 1).to(tl.int64) * unit
    return tl.load(bank + start + columns, mask=inside, other=0.0) != 0.0


@triton.jit
def _is_reading(op, slot, flags):
    gate = (op == _GATE) & ((slot == 0) | ((flags & _ADDS) != 0))
    probe = (op == _PROBE) & ((flags & _UNITS) == 0)
    return ((op >= _CLIP) & (op <= _FEATURE)) | gate | probe | (op == _UNIT)


@triton.jit
def _factor(op, x, param):
    """Return f before gating, for all ops that change h except ADD_MATCHED; `x` is ⟨h, read⟩."""
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
def _store_dose(slot, change, before, totals):
    """Store how long an edit's change of h is, relative to h before it, in column `slot` − 1."""
    moved, length = tl.reduce((change * change, before * before), 0, _add_pairs)
    ratio = tl.div_rn(tl.sqrt_rn(moved), tl.sqrt_rn(length))
    ratio = tl.where(moved == 0.0, 0.0, ratio)
    bits = tl.maximum(ratio.to(tl.int32, bitcast=True), _NO_CHANGE)
    tl.store(totals + _DOSES + slot - 1, bits)


@triton.jit
def _product(at, instructions, numbers, bank, columns, inside, unit: tl.constexpr):
    """Return what a plain addition adds, its flags, and the slot of its edit's dose."""
    word = instructions + at * _INSTRUCTIONS
    write = tl.load(word + _WRITE).to(tl.int64) * unit
    factor = tl.load(numbers + at * _PARAMS + _A)
    flags = tl.load(word + _FLAGS)
    added = tl.zeros([columns.shape[0]], dtype=tl.float32)
    if factor != 0.0:
        added = factor * tl.load(bank + write + columns, mask=inside, other=0.0)
    return added, flags, tl.load(word + _SLOT)


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
    product,  # the row's product with its matrix
    decoded,  # what an SAE made of the row
    half,
    rest,
    columns,
    inside,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    has_maps: tl.constexpr,
    has_saes: tl.constexpr,
):
    """Run instructions of any kind; return what they add, or made, which, and how many counted."""
    whole = tl.full((), 0, tl.int32)
    stale = tl.full((), 0, tl.int32)  # whether the stream has changed since h was read
    delta = tl.zeros([columns.shape[0]], dtype=tl.float32)
    base = entered_row(half, rest, inside, has_residual)
    gate = tl.full((), 1.0, tl.float32)
    units = tl.full((), 0.0, tl.float32)
    done = tl.full((), 0, tl.int32)
    for at in range(start, start + count):
        word = instructions + at * _INSTRUCTIONS
        param = numbers + at * _PARAMS
        op = tl.load(word + _OP)
        flags = tl.load(word + _FLAGS)
        slot = tl.load(word + _SLOT)
        ids_count = tl.load(word + _IDS_COUNT)
        mask = tl.load(word + _MASK)
        a = tl.load(param + _A)
        applies = ids_count == 0
        if ids_count != 0:
            first = tl.load(word + _IDS_START)
            listed = is_listed(lists, first, ids_count, ids + row * _IDS)
            applies = listed != ((flags & _OTHER_IDS) != 0)
        if applies:
            if ((flags & _FRESH) != 0) & (at != start):
                base = _now(delta, whole, half, rest, inside, has_residual)
                stale = tl.full((), 0, tl.int32)
            x = tl.full((), 0.0, tl.float32)
            if _is_reading(op, slot, flags):
                read = tl.load(word + _READ).to(tl.int64) * unit
                vector = tl.load(bank + read + columns, mask=inside, other=0.0)
                seen = _masked(base, mask, bank, columns, inside, unit)
                x = tl.sum(seen * vector, axis=0)
            if op < _GATE:
                if op == _ADD_MATCHED:
                    seen = _masked(base, mask, bank, columns, inside, unit)
                    factor = a * tl.sqrt_rn(tl.sum(seen * seen, axis=0))
                else:
                    factor = _factor(op, x, param)
                share = tl.full((), 1.0, tl.float32)
                if (flags & _GATED) != 0:
                    factor = tl.where(gate == 0.0, 0.0, factor * gate)
                    share = gate
                if factor != 0.0:
                    write = tl.load(word + _WRITE)
                    if (flags & _ROW_BY_POSITION) != 0:
                        write += tl.load(token + _POSITION) * (width // unit)
                    start_of = write.to(tl.int64) * unit
                    if op < _REPLACE:
                        # The product is rounded separately (the launch disables fused
                        # multiply-add), so that +v and −v cancel exactly.
                        vector = tl.load(bank + start_of + columns, mask=inside, other=0.0)
                        vector = _masked(vector, mask, bank, columns, inside, unit)
                        delta = delta + factor * vector
                    else:
                        # kept · h + f · v; not h and a change, which has the rounding of h.
                        kept = 1.0 - factor
                        if op == _SCALE:
                            vector = base
                            kept = tl.full((), 0.0, tl.float32)
                            factor = (1.0 - share) + share * a
                        else:
                            vector = tl.load(bank + start_of + columns, mask=inside, other=0.0)
                        if op == _MULTIPLY:
                            vector = vector * base
                        if op == _RAISE:
                            top = tl.max(tl.where(inside, base, float("-inf")), axis=0)
                            top += tl.load(param + _B) * tl.maximum(tl.abs(top), 1.0)
                            vector += tl.where(inside, top, 0.0)
                        if has_maps:  # noqa: SIM102  (known when the kernel is compiled)
                            if op == _MAP:
                                vector += tl.load(product + columns, mask=inside, other=0.0)
                        if has_saes:  # noqa: SIM102  (likewise)
                            if op == _RECONSTRUCT:
                                vector = tl.load(decoded + columns, mask=inside, other=0.0)
                                kept = 1.0 - factor * tl.load(param + _B)
                        if factor != 1.0:
                            vector = factor * vector
                        if kept != 0.0:
                            vector = kept * base + vector
                        now = base
                        if stale != 0:
                            # Instructions of one edit read the same h, and add their changes.
                            now = _now(delta, whole, half, rest, inside, has_residual)
                            vector += now - base
                        if mask > 0:
                            chosen = _is_chosen(mask, bank, columns, inside, unit)
                            vector = tl.where(chosen, vector, now)
                        delta = vector
                        whole = tl.full((), 1, tl.int32)
                    stale = tl.full((), 1, tl.int32)
                if (flags & _KEEP) != 0:
                    now = _now(delta, whole, half, rest, inside, has_residual)
                    # One reduction for both norms: bit-identical for equal rows.
                    before = _masked(base, mask, bank, columns, inside, unit)
                    after = _masked(now, mask, bank, columns, inside, unit)
                    old, new = tl.reduce((before * before, after * after), 0, _add_pairs)
                    old = tl.sqrt_rn(old)
                    new = tl.sqrt_rn(new)
                    if (new != 0.0) & (old != new):
                        now = _now(delta, whole, half, rest, inside, has_residual)
                        scaled = now * tl.div_rn(old, new)
                        if mask > 0:
                            chosen = _is_chosen(mask, bank, columns, inside, unit)
                            scaled = tl.where(chosen, scaled, now)
                        delta = scaled
                        whole = tl.full((), 1, tl.int32)
                        stale = tl.full((), 1, tl.int32)
                if slot > 0:
                    now = _now(delta, whole, half, rest, inside, has_residual)
                    _store_dose(slot, now - base, base, totals)
            elif op == _UNIT:
                units += tl.load(param + _B) * activated(x + a, tl.load(param + _C))
            elif op == _GATE:
                x += a
                if slot > 0:
                    x = tl.where((flags & _ADDS) != 0, x, 0.0) + tl.load(slots + slot - 1)
                b = tl.load(param + _B)
                c = tl.load(param + _C)
                gate = sigmoid(c * (x - b))
                if (flags & _STEP) != 0:
                    gate = tl.where(x > b, 1.0, 0.0)
            elif (op == _PROBE) & (slot > 0):
                if (flags & _UNITS) != 0:
                    x = units
                    units = tl.full((), 0.0, tl.float32)
                x += a
                if (flags & _ADDS) != 0:
                    x += tl.load(slots + slot - 1)
                tl.store(slots + slot - 1, x)
                tl.store(totals + _NONFINITE, 1, mask=is_infinite(x))
            done += ((flags & _COUNTED) != 0).to(tl.int32)
    return delta, whole, done


@triton.jit
def site_kernel(
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
    mapped,
    decoded,
    hidden_stride,
    residual_stride,
    tally_stride,
    slots,
    mapped_stride,
    decoded_stride,
    width: tl.constexpr,
    unit: tl.constexpr,
    has_residual: tl.constexpr,
    has_maps: tl.constexpr,
    has_saes: tl.constexpr,
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
    totals = tally + row * tally_stride
    row = row.to(tl.int64)
    group = tl.load(token + _GROUP)
    record = tl.load(token + _RECORD)
    signature = tl.load(totals)
    edits = tl.load(totals + _EDITS)
    captures = tl.load(totals + _CAPTURES)
    start = tl.load(table + program * _TABLE + _EDIT_START)
    count = tl.load(table + program * _TABLE + _EDIT_COUNT)
    kind = tl.load(table + program * _TABLE + _KIND)
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
        if (count > 0) & (kind != _READS):
            target = ring + (first + record - 1 + place - 1).to(tl.int64) * unit + columns
            if kind == _PLAIN:
                value = tl.load(half, mask=inside, other=0.0)
                other = value
                if has_residual:
                    other = tl.load(rest, mask=inside, other=0.0)
                delta, flags, slot = _product(
                    start, instructions, numbers, bank, columns, inside, unit
                )
                done = ((flags & _COUNTED) != 0).to(tl.int32)
                change = delta  # of the edit that began last
                if slot > 0:
                    entered = entered_row(half, rest, inside, has_residual)
                    _store_dose(slot, change, entered, totals)
                for at in range(start + 1, start + count):
                    added, flags, slot = _product(
                        at, instructions, numbers, bank, columns, inside, unit
                    )
                    change = tl.where((flags & _FRESH) != 0, added, change + added)
                    delta = delta + added
                    done += ((flags & _COUNTED) != 0).to(tl.int32)
                    if slot > 0:
                        before = entered_row(half, rest, inside, has_residual) + (delta - change)
                        _store_dose(slot, change, before, totals)
                tl.store(totals + _EDITS, edits + done)
                made, lost, same = summed_row(delta, value, other, has_residual)
                write_row(
                    made, lost, same, value, other, half, rest, target, captured, totals, inside,
                    limit, has_residual, block,
                )  # fmt: skip
            else:
                delta, whole, done = _run(
                    start, count, row, token, ids, totals, instructions, numbers, lists, bank,
                    scores + row * slots, mapped + row * mapped_stride,
                    decoded + row * decoded_stride, half, rest, columns, inside,
                    width, unit, has_residual, has_maps, has_saes,
                )  # fmt: skip
                value = tl.load(half, mask=inside, other=0.0)
                other = value
                if has_residual:
                    other = tl.load(rest, mask=inside, other=0.0)
                tl.store(totals + _EDITS, edits + done)
                if whole != 0:
                    same = is_entered(delta, value, other, has_residual)
                    write_row(
                        delta, nothing(delta), same, value, other, half, rest, target, captured,
                        totals, inside, limit, has_residual, block,
                    )  # fmt: skip
                else:
                    made, lost, same = summed_row(delta, value, other, has_residual)
                    write_row(
                        made, lost, same, value, other, half, rest, target, captured, totals,
                        inside, limit, has_residual, block,
                    )  # fmt: skip
        else:
            if count > 0:
                # The row stays as it is: it is not written.
                done = read_scores(
                    start, count, totals, instructions, numbers, bank, scores + row * slots,
                    half, rest, columns, inside, unit, has_residual,
                )  # fmt: skip
                tl.store(totals + _EDITS, edits + done)
            if captured:
                copied = entered_row(half, rest, inside, has_residual).to(ring.dtype.element_ty)
                target = ring + (first + record - 1 + place - 1).to(tl.int64) * unit + columns
                tl.store(target, copied, mask=inside)
                tl.store(totals + _NONFINITE, 1, mask=any_infinite(copied, block) != 0)
