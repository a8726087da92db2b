"""The `site` op as one Triton kernel: one program per token, gone after one load when idle."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops import layout

_TOKENS = tl.constexpr(layout.TOKEN_COLUMNS)
_TALLY = tl.constexpr(layout.TALLY_COLUMNS)
_TABLE = tl.constexpr(layout.TABLE_COLUMNS)
_GROUP = tl.constexpr(layout.GROUP)
_RECORD = tl.constexpr(layout.RECORD)
_EDITS = tl.constexpr(layout.EDITS)
_CAPTURES = tl.constexpr(layout.CAPTURES)
_EDIT_COUNT = tl.constexpr(layout.EDIT_COUNT)
_PLACE = tl.constexpr(layout.PLACE)
_CODE = tl.constexpr(layout.CODE)

MAX_BLOCK = 4096


@triton.jit
def _site_kernel(
    hidden,
    residual,
    tokens,
    tally,
    table,
    edit_rows,
    edit_scales,
    bank,
    ring,
    hidden_stride,
    residual_stride,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    program = tl.load(tokens + row * _TOKENS)
    if program == 0:
        return
    row = row.to(tl.int64)
    group = tl.load(tokens + row * _TOKENS + _GROUP)
    record = tl.load(tokens + row * _TOKENS + _RECORD)
    start = tl.load(table + program * _TABLE)
    count = tl.load(table + program * _TABLE + _EDIT_COUNT)
    place = tl.load(table + group * _TABLE + _PLACE)
    code = tl.load(table + _CODE)
    captured = (record > 0) & (place > 0)
    target = (record - 1 + place - 1).to(tl.int64)

    if (count > 0) | captured:
        for first in tl.static_range(0, width, block):
            columns = first + tl.arange(0, block)
            inside = columns < width
            value = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
            if count > 0:
                total = value.to(tl.float32)
                for edit in range(start, start + count):
                    vector = tl.load(edit_rows + edit).to(tl.int64)
                    scale = tl.load(edit_scales + edit)
                    total += scale * tl.load(
                        bank + vector * width + columns, mask=inside, other=0.0
                    )
                value = total.to(value.dtype)
                tl.store(hidden + row * hidden_stride + columns, value, mask=inside)
            if captured:
                stream = value
                if has_residual:
                    rest = tl.load(
                        residual + row * residual_stride + columns, mask=inside, other=0.0
                    )
                    stream = value.to(tl.float32) + rest.to(tl.float32)
                tl.store(
                    ring + target * width + columns, stream.to(ring.dtype.element_ty), mask=inside
                )

    # One program owns a token and sites follow each other on the stream, so plain stores do.
    done = tally + row * _TALLY
    tl.store(done, tl.load(done) + code)
    tl.store(done + _EDITS, tl.load(done + _EDITS) + count)
    tl.store(done + _CAPTURES, tl.load(done + _CAPTURES) + captured.to(tl.int32))


def site_triton(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    tally: Tensor,
    table: Tensor,
    edit_rows: Tensor,
    edit_scales: Tensor,
    bank: Tensor,
    ring: Tensor,
) -> None:
    """See `midstream.ops.site.site`, which has the same arguments."""
    num_rows, width = hidden.shape
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    with torch.cuda.device(hidden.device):
        _site_kernel[(num_rows,)](
            hidden,
            residual,
            tokens,
            tally,
            table,
            edit_rows,
            edit_scales,
            bank,
            ring,
            hidden.stride(0),
            0 if residual is None else residual.stride(0),
            width=width,
            has_residual=residual is not None,
            block=block,
            num_warps=8 if block >= 4096 else 4,
        )
