"""Affine uint8 quantisation of rows, shared by the codecs `full8`, `rp8` and `topk8`.

A row of `width` numbers takes 8 + width bytes: float32 scale, float32 zero, uint8 q [width].
It decodes to `zero + scale · q`, in float32 (where that could overflow, in float64, clamped to
float32's range). A row with a non-finite value has scale 0, zero NaN and q 0: it decodes to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.codecs.base import reject_rows, view_as

HEADER_BYTES = 8
STEPS = 255
NAN_BITS = 0x7FC00000  # the quiet NaN that is the zero of a non-finite row
FLOAT32_MAX = torch.finfo(torch.float32).max
_WIDE = 2.0**126  # above this, decoded values may exceed float32's range
# 255 · scale may exceed the range of a row by one unit in the scale's last place.
_SLACK = 1 + 2**-22


def encode_affine(rows: Tensor) -> Tensor:
    """Encode rows [n, width] to uint8 [n, 8 + width], each with the finest scale that spans it.

    The zero is the minimum, the scale (maximum − minimum) / 255 rounded up, so that no q exceeds
    255. |x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴. Rows of equal values are exact.
    """
    low, high = (bound.float() for bound in torch.aminmax(rows, dim=1, keepdim=True))
    valid = torch.isfinite(low) & torch.isfinite(high)  # aminmax propagates NaN
    span = high.double() - low.double()
    scale = _rounded_up(span / STEPS)
    # Where the difference of two values can overflow float32, everything is halved.
    factor = torch.where(span > FLOAT32_MAX, 0.5, torch.ones_like(scale))
    divisor = torch.where(scale > 0, scale * factor, 1.0)
    steps = torch.addcmul(-low * factor, rows.float(), factor).div_(divisor).round_()

    n, width = rows.shape
    data = torch.empty(n, HEADER_BYTES + width, dtype=torch.uint8, device=rows.device)
    # + 0.0: the minimum of a row with both zeros may be −0.0.
    header = torch.cat([scale, low + 0.0], dim=1)
    data[:, :HEADER_BYTES] = torch.where(valid, header, _mark(header)).view(torch.uint8)
    quantised = data[:, HEADER_BYTES:]
    quantised.copy_(steps)
    quantised.mul_(valid)  # the conversion of NaN to uint8 is machine-dependent
    return data


def decode_affine(data: Tensor) -> Tensor:
    """Decode uint8 [n, 8 + width] to float32 [n, width]."""
    scale, zero = scales_and_zeros(data)
    steps = data[:, HEADER_BYTES:]
    values = steps.float().mul_(scale).add_(zero)
    wide = (zero.double().abs() + STEPS * scale.double() > _WIDE).squeeze(1)
    if bool(wide.any()):
        exact = steps[wide].double().mul_(scale[wide].double()).add_(zero[wide].double())
        values[wide] = exact.clamp_(-FLOAT32_MAX, FLOAT32_MAX).float()
    return values


def scales_and_zeros(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, zero), each float32 [n, 1], of uint8 [n, 8 + width]."""
    header = view_as(data[:, :HEADER_BYTES], torch.float32)
    return header[:, :1], header[:, 1:]


def check_affine(spec: str, data: Tensor) -> None:
    """Check that uint8 [n, 8 + width] is a possible output of `encode_affine`."""
    scale, zero = (part.squeeze(1) for part in scales_and_zeros(data))
    marked = (zero.contiguous().view(torch.int32) == NAN_BITS) & (scale == 0)
    reject_rows(spec, ~torch.isfinite(scale), "the scale is not a finite number")
    reject_rows(spec, torch.signbit(scale), "the scale is negative")
    reject_rows(spec, ~torch.isfinite(zero) & ~marked, "the zero is not a finite number")
    highest = zero.double() + scale.double() * STEPS
    reject_rows(spec, highest > FLOAT32_MAX * _SLACK, "the values exceed float32's range")
    flat = scale == 0
    stepped = torch.zeros_like(flat)
    stepped[flat] = (data[flat, HEADER_BYTES:] > 0).any(dim=1)
    reject_rows(spec, stepped, "the scale is 0, but the quantised values are not")


def _mark(header: Tensor) -> Tensor:
    """Return the headers [n, 2] of non-finite rows: scale 0 and zero NaN."""
    mark = torch.zeros_like(header)
    mark.view(torch.int32)[:, 1] = NAN_BITS
    return mark


def _rounded_up(values: Tensor) -> Tensor:
    nearest = values.float()
    return torch.where(
        nearest.double() < values,
        torch.nextafter(nearest, torch.full_like(nearest, torch.inf)),
        nearest,
    )
