"""Softmax-weighted means of values, and their maxima, over the tokens so far, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# exp is taken of logits less the next multiple of this above the largest so far. It changes with
# few tokens, so that sums of many are one call; exp(-256) is far from the smallest float64.
_STEP = 256.0
_ELEMENTS = 1 << 20  # of the windows that are computed at once


class AttentionState(NamedTuple):
    """What is kept of the tokens so far; empty at first.

    Attributes:
        rows: of "softmax" float64 [3, heads]: what is subtracted of logits, Σ exp, Σ exp · value;
            with a window [n, 2, heads]: the logits and values of its last tokens, n below its
            size; of "max" [1, heads]: the largest value.
    """

    rows: Array | None = None


def mean_so_far(
    state: AttentionState, logits: Array, values: Array
) -> tuple[AttentionState, Array]:
    """Return Σ_s softmax_s(logit) · value over the tokens s up to each; a streaming softmax.

    Args:
        state: after the tokens before.
        logits, values: finite float64 [n, heads], n at least 1.

    Returns:
        The state after them, and float64 [n, heads].
    """
    import numpy as np

    count, heads = logits.shape
    if state.rows is None:
        shift, sums = np.full(heads, -np.inf), np.zeros((2, 1, heads))
    else:
        shift, sums = state.rows[0], state.rows[1:, None]
    edges, shifts = [0, count], None
    if not (logits <= shift).all():
        top = np.maximum(np.maximum.accumulate(logits), shift)
        shifts = np.maximum(_STEP * np.ceil(top / _STEP), shift)
        changes = np.flatnonzero((shifts[1:] != shifts[:-1]).any(1)) + 1
        edges[1:1] = changes.tolist()
    out = np.empty_like(logits)
    for start, stop in zip(edges, edges[1:], strict=False):
        if shifts is not None and (shifts[start] != shift).any():
            # Without a token yet, exp(-inf) is 0.
            sums = sums * np.exp(shift - shifts[start])
            shift = shifts[start]
        parts = np.empty((2, 1 + stop - start, heads))
        parts[:, :1] = sums
        np.exp(logits[start:stop] - shift, out=parts[0, 1:])
        np.multiply(parts[0, 1:], values[start:stop], out=parts[1, 1:])
        parts = np.add.accumulate(parts, 1)
        np.divide(parts[1, 1:], parts[0, 1:], out=out[start:stop])
        sums = parts[:, -1:]
    return AttentionState(np.concatenate([shift[None], sums[:, 0]])), out


def mean_in_window(
    state: AttentionState, logits: Array, values: Array, size: int
) -> tuple[AttentionState, Array]:
    """Return the same as `mean_so_far` over the last `size` tokens up to each."""
    import numpy as np

    rows = np.stack([logits, values], 1)  # [n, 2, heads]
    seen = rows if state.rows is None else np.concatenate([state.rows, rows])
    count, heads = logits.shape
    missing = count + size - 1 - len(seen)
    before = np.zeros((missing, 2, heads))
    before[:, 0] = -np.inf
    padded = np.concatenate([before, seen])
    out = np.empty_like(logits)
    many = max(1, _ELEMENTS // (size * heads))
    for start in range(0, count, many):
        stop = min(start + many, count)
        windows = padded[np.arange(start, stop)[:, None] + np.arange(size)]  # [n, size, 2, heads]
        weights = np.exp(windows[:, :, 0] - windows[:, :, 0].max(1, keepdims=True), order="C")
        weighted = np.multiply(weights, windows[:, :, 1], order="C")
        out[start:stop] = np.add.reduce(weighted, 1) / np.add.reduce(weights, 1)
    return AttentionState(seen[max(0, len(seen) - size + 1) :].copy()), out


def largest_so_far(state: AttentionState, values: Array) -> tuple[AttentionState, Array]:
    """Return the largest value of the tokens up to each, float64 [n, heads]."""
    import numpy as np

    seen = values if state.rows is None else np.concatenate([state.rows, values])
    out = np.maximum.accumulate(seen)[-len(values) :]
    return AttentionState(out[-1:].copy()), out
