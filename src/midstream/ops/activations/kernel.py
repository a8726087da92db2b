"""Functions of one number, in Triton: those of gates, and of hidden units of MLPs."""

from __future__ import annotations

import triton
import triton.language as tl

from midstream.ops import layout

_GELU = tl.constexpr(float(layout.ACTIVATIONS.index("gelu")))
_TANH = tl.constexpr(float(layout.ACTIVATIONS.index("tanh")))
_SILU = tl.constexpr(float(layout.ACTIVATIONS.index("silu")))


@triton.jit
def sigmoid(x):
    """Return σ(x) without overflow; exactly 0 or 1 for large |x|."""
    small = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0.0, 1.0, small), 1.0 + small)


@triton.jit
def activated(x, number):
    """Return an activation of a scalar; see `layout.ACTIVATIONS`."""
    activation = tl.where(x < 0.0, 0.0, x)  # NaN stays
    if number == _GELU:
        activation = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif number == _TANH:
        activation = 2.0 * sigmoid(2.0 * x) - 1.0
    elif number == _SILU:
        activation = x * sigmoid(x)
    return activation
