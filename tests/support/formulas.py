"""Reference results of edits and instructions, in float64 NumPy, from their formulas.

`apply` follows the docstring of each operation, `run` the table of `midstream.ops.layout`: two
independent readings of one intention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Ablate,
    Affine,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Probe,
    Replace,
    Route,
    Scale,
    Steer,
    Vector,
)
from midstream.plan.instructions import Instruction
from midstream.plan.operations import Edit, Reading

Array = NDArray[np.float64]


def wide(value: Any) -> Array:
    """A Vector as float64 [size], or a tuple of them as [rows, size]."""
    if isinstance(value, Vector):
        return value.numpy().astype(np.float64)
    return np.stack([wide(row) for row in value])


def norm(h: Array) -> Array:
    """Lengths, [..., 1]."""
    return np.linalg.norm(h, axis=-1, keepdims=True)


def along(h: Array, vector: Array) -> Array:
    """Products with one vector, [..., 1]."""
    return (h @ vector)[..., None]


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


# ---------------------------------------------------------------- operations


def apply(
    edit: Edit, h: ArrayLike, score: ArrayLike | None = None, rows: ArrayLike | None = None
) -> Array:
    """What an edit makes of the vectors of the tokens at which it applies.

    Args:
        edit: with vectors by value.
        h: [..., H] of these tokens, at one of the edit's taps; the array is left as it was.
        score: [...], what a Gate reads, where that is at another tap than `h` is of.
        rows: int [...], which of a Replace's rows each token gets, where there are several; if it
            is left out, h is [rows, H], one token for each row.

    Returns:
        float64 [..., H].
    """
    h = np.asarray(h).astype(np.float64)
    if not isinstance(edit, Gate):
        return _change(edit, h, np.ones((*h.shape[:-1], 1)), rows)
    read = read_score(edit.probe, h) if score is None else np.asarray(score, np.float64)
    over = read[..., None] - edit.threshold
    g = (over > 0) * 1.0 if edit.sharpness is None else sigmoid(edit.sharpness * over)
    return _change(edit.edit, h, g, rows)


def read_score(probe: Probe | Reading, h: ArrayLike) -> Array:
    """⟨h, direction⟩ + bias, float64 [...], of h [..., H]."""
    return along(np.asarray(h, np.float64), wide(probe.direction))[..., 0] + probe.bias


def _change(edit: Edit, h: Array, g: Array, rows: ArrayLike | None) -> Array:
    """The edit with the amount that it adds multiplied by g, [..., 1]."""
    changed = _added(edit, h, g, rows)
    if getattr(edit, "norm", None) != "keep":
        return changed
    length = norm(changed)
    return changed * norm(h) / np.where(length == 0, 1, length)


def _added(edit: Edit, h: Array, g: Array, rows: ArrayLike | None) -> Array:
    match edit:
        case Steer():
            v = wide(edit.rows or edit.vector)
            if edit.rows and rows is not None:
                v = v[np.asarray(rows)]
            if edit.norm == "match":
                own = np.linalg.norm(v, axis=-1, keepdims=True)
                return h + g * edit.scale * norm(h) / np.where(own == 0, 1, own) * v
            return h + g * edit.scale * v
        case Ablate():
            # The projection by least squares: no basis is made.
            d = wide(edit.directions)
            inside = h @ np.linalg.pinv(d) @ d
            return h - g * edit.strength * inside
        case Clamp():
            v = wide(edit.direction)
            u = v / np.linalg.norm(v)
            x = along(h, u)
            low = -np.inf if edit.low is None else edit.low
            high = np.inf if edit.high is None else edit.high
            return h + g * edit.strength * (np.clip(x, low, high) - x) * u
        case Feature():
            x = h @ wide(edit.encoder).T + np.array(edit.bias)
            act = np.where(x > np.array(edit.threshold), x, 0.0)
            value = np.array(edit.value)
            amount = {
                "set": lambda: value - act,
                "add": lambda: value + 0.0 * act,
                "scale": lambda: (value - 1) * act,
                "ablate": lambda: -act,
            }[edit.mode]()
            return h + g * amount @ wide(edit.decoder)
        case Affine() if edit.matrix is not None:
            size = h.shape[-1]
            bias = wide(edit.bias) if isinstance(edit.bias, Vector) else edit.bias
            mapped = h @ wide(edit.matrix).reshape(size, size).T + bias
            return h + g * edit.scale * (mapped - h)
        case Affine():
            inner = h @ wide(edit.read).T + wide(edit.bias)
            return h + g * edit.scale * inner @ wide(edit.write)
        case LoReFT():
            r, w, b = wide(edit.rotation), wide(edit.weight), wide(edit.bias)
            return h + g * (h @ w.T + b - h @ r.T) @ r
        case Replace():
            given = wide(edit.rows)
            if rows is not None:
                given = given[np.asarray(rows)]
            alpha = g * edit.alpha
            return (1 - alpha) * h + alpha * given
        case Scale():
            factor = wide(edit.factor) if isinstance(edit.factor, Vector) else edit.factor
            shift = 0.0 if edit.shift is None else wide(edit.shift)
            return h + g * (factor * h + shift - h)
        case Route():
            return (1 - g) * h + g * _routed(edit, h)
    raise TypeError(f"no formula for {type(edit).__name__}")


def _routed(edit: Route, h: Array) -> Array:
    bias, found = dict(edit.bias), h.copy()
    for expert in bias.keys() - set(edit.activate):
        found[..., expert] += bias[expert]
    found[..., list(edit.deactivate)] = -1000.0
    largest = found.max(axis=-1)
    for expert in edit.activate:
        raised = largest + np.maximum(np.abs(largest), 1) / 64
        found[..., expert] = raised + bias.get(expert, 0.0)
    return found


# ---------------------------------------------------------------- instructions


def run(
    instructions: Sequence[Instruction],
    h: ArrayLike,
    scores: Mapping[int, ArrayLike] | None = None,
    positions: ArrayLike | None = None,
) -> Array:
    """What a program makes of some tokens' vectors, without rounding to float32.

    Args:
        instructions: in order; those with token ids are not known here.
        h: [..., H]; the array is left as it was.
        scores: by slot, [...]: those that are read; those of PROBEs with a slot are put there.
        positions: int [...], of the tokens; if left out, 0 … along the last axis but one.

    Returns:
        float64 [..., H].
    """
    now = np.asarray(h).astype(np.float64)
    fresh: Array | None = None
    g = np.ones((*now.shape[:-1], 1))
    where = np.arange(now.shape[-2]) if positions is None and now.ndim > 1 else positions
    for step in instructions:
        assert not step.flags & Flags.OTHER_IDS
        if Flags.FRESH in step.flags:
            fresh = now.copy()
        assert fresh is not None or not step.reads, "nothing was taken to read"
        # The components outside of the mask are neither read nor changed.
        mask = 1.0 if step.mask is None else (wide(step.mask) != 0) * 1.0
        seen = None if fresh is None else fresh * mask
        if step.op is Op.GATE:
            g = _gate(step, seen, scores)
            continue
        if step.op is Op.PROBE:
            if step.slot is not None and isinstance(scores, dict):
                scores[step.slot] = (along(seen, wide(step.read)) + step.a)[..., 0]
            continue
        f, v = _amount(step, seen, fresh, where)
        now = now + (g * f if Flags.GATED in step.flags else f) * v * mask
        if Flags.KEEP in step.flags:
            length = norm(now * mask)
            kept = now * norm(seen) / np.where(length == 0, 1, length)
            now = np.where(mask == 0, now, kept)
    return now


def _gate(step: Instruction, h: Array | None, scores: Mapping[int, ArrayLike] | None) -> Array:
    if step.slot is None:
        x = along(h, wide(step.read)) + step.a
    else:
        assert scores is not None
        x = np.asarray(scores[step.slot], np.float64)[..., None]
    if Flags.STEP in step.flags:
        return (x > step.b) * 1.0
    return sigmoid(step.c * (x - step.b))


def _amount(
    step: Instruction, h: Array | None, whole: Array | None, positions: ArrayLike | None
) -> tuple[Any, Any]:
    """(f, v) of the table; `whole` is h without a mask."""
    is_read = step.read is not None and step.op is not Op.MAP
    x = along(h, wide(step.read)) if is_read else None
    write = None
    if Flags.ROW_BY_POSITION in step.flags:
        write = wide(step.write)[np.asarray(positions) - step.first]
    elif step.write:
        (only,) = step.write
        write = wide(only)
    match step.op:
        case Op.ADD:
            return step.a, write
        case Op.ADD_MATCHED:
            return step.a * norm(h), write
        case Op.CLIP:
            return step.c * (np.clip(x, step.a, step.b) - x), write
        case Op.LINEAR:
            return step.a * (x + step.b), write
        case Op.FEATURE:
            inner = x + step.a
            return step.c * np.where(inner > step.b, inner, 0.0) + step.d, write
        case Op.REPLACE:
            return step.a, write - h
        case Op.MAP:
            matrix = wide(step.read).reshape(h.shape[-1], h.shape[-1])
            return step.a, np.einsum("ij,...j->...i", matrix, whole) + write - h
        case Op.SCALE:
            return step.a - 1, h
        case Op.MULTIPLY:
            return step.a, write * h - h
        case Op.RAISE:
            largest = whole.max(axis=-1, keepdims=True)
            return step.a, write + largest + step.b * np.maximum(np.abs(largest), 1) - h
    raise TypeError(f"no formula for {step.op}")
