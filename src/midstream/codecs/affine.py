"""Rows of numbers as uint8 with a scale and a zero each: what three of the codecs are made of.

A row of `width` numbers takes 8 + width bytes: float32 scale, float32 zero, uint8 q [width].
It reads `zero + scale · q`, in float32 (where that could overflow, in float64 and brought within
float32's range). A row with a value that is not finite has scale 0, zero NaN and q 0: it reads NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.codecs.base import Codec, refuse_row, reread

HEADER_BYTES = 8
STEPS = 255
NAN_BITS = 0x7FC00000  # the quiet NaN that stands for the zero of a row that is not finite
FLOAT32_MAX = torch.finfo(torch.float32).max
_WIDE = 2.0**126  # above this, a row may read values beyond float32
# 255 · scale may exceed the range of a row by one unit in the scale's last place.
_SLACK = 1 + 2**-22


def encode_affine(rows: Tensor) -> Tensor:
    """uint8 [n, 8 + width]: each row with the finest scale that spans it.

    The zero is the row's minimum, the scale (maximum − minimum) / 255 rounded up to a float32, so
    that no q exceeds 255. With x̂ as it reads, |x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴: half a
    step, and float32's rounding. Rows in which all values are equal are exact.

    Args:
        rows: [n, width] float32, bfloat16 or float16.
    """
    low, high = (bound.float() for bound in torch.aminmax(rows, dim=1, keepdim=True))
    valid = torch.isfinite(low) & torch.isfinite(high)  # aminmax hands NaN on
    span = high.double() - low.double()
    scale = _rounded_up(span / STEPS)
    # Where a difference of two values can overflow float32, all is halved.
    factor = torch.where(span > FLOAT32_MAX, 0.5, torch.ones_like(scale))
    divisor = torch.where(scale > 0, scale * factor, 1.0)
    steps = torch.addcmul(-low * factor, rows.float(), factor).div_(divisor).round_()

    n, width = rows.shape
    data = torch.empty(n, HEADER_BYTES + width, dtype=torch.uint8, device=rows.device)
    # + 0.0: of a row with both zeros, either may be its minimum.
    header = torch.cat([scale, low + 0.0], dim=1)
    data[:, :HEADER_BYTES] = torch.where(valid, header, _mark(header)).view(torch.uint8)
    quantised = data[:, HEADER_BYTES:]
    quantised.copy_(steps)
    quantised.mul_(valid)  # what a NaN becomes as uint8 is the machine's choice
    return data


def decode_affine(data: Tensor) -> Tensor:
    """float32 [n, width] of uint8 [n, 8 + width]."""
    scale, zero = scales_and_zeros(data)
    steps = data[:, HEADER_BYTES:]
    values = steps.float().mul_(scale).add_(zero)
    wide = (zero.double().abs() + STEPS * scale.double() > _WIDE).squeeze(1)
    if bool(wide.any()):
        exact = steps[wide].double().mul_(scale[wide].double()).add_(zero[wide].double())
        values[wide] = exact.clamp_(-FLOAT32_MAX, FLOAT32_MAX).float()
    return values


def scales_and_zeros(data: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero), each float32 [n, 1], of uint8 [n, 8 + width]."""
    header = reread(data[:, :HEADER_BYTES], torch.float32)
    return header[:, :1], header[:, 1:]


def check_affine(codec: Codec, data: Tensor) -> None:
    """Whether uint8 [n, 8 + width] can have come from `encode_affine`.

    Raises:
        CodecError: a scale is negative or not finite, a zero is not finite in a row that is not
            marked, a row spans more than float32 does, or a row without a scale has steps.
    """
    scale, zero = (part.squeeze(1) for part in scales_and_zeros(data))
    marked = (zero.contiguous().view(torch.int32) == NAN_BITS) & (scale == 0)
    refuse_row(codec, ~torch.isfinite(scale), "the scale is not a finite number")
    refuse_row(codec, torch.signbit(scale), "the scale is negative")
    refuse_row(codec, ~torch.isfinite(zero) & ~marked, "the zero is not a finite number")
    highest = zero.double() + scale.double() * STEPS
    refuse_row(codec, highest > FLOAT32_MAX * _SLACK, "the values are beyond float32")
    flat = scale == 0
    stepped = torch.zeros_like(flat)
    stepped[flat] = (data[flat, HEADER_BYTES:] > 0).any(dim=1)
    refuse_row(codec, stepped, "the scale is 0, but not all bytes after it are")


def _mark(header: Tensor) -> Tensor:
    """[n, 2]: scale 0 and zero NaN."""
    mark = torch.zeros_like(header)
    mark.view(torch.int32)[:, 1] = NAN_BITS
    return mark


def _rounded_up(values: Tensor) -> Tensor:
    """The smallest float32 that are not less than these float64."""
    nearest = values.float()
    return torch.where(
        nearest.double() < values,
        torch.nextafter(nearest, torch.full_like(nearest, torch.inf)),
        nearest,
    )
