"""Scores of probes by their definition: float64, each token from all tokens up to it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.conditions import pooled

Array = NDArray[np.float64]


def attended(logits: Array, values: Array, window: int = 0) -> Array:
    """Σ over heads of the softmax-weighted mean of values up to each token, [n]."""
    scores = []
    for stop in range(1, len(logits) + 1):
        seen = slice(max(0, stop - window) if window else 0, stop)
        weights = np.exp(logits[seen] - logits[seen].max(0))
        scores.append(float(((weights / weights.sum(0)) * values[seen]).sum()))
    return np.array(scores)


def multimax(values: Array) -> Array:
    """Σ over heads of the largest value up to each token, [n]."""
    return np.array([float(values[:stop].max(0).sum()) for stop in range(1, len(values) + 1)])


def sigmoid(scores: Array) -> Array:
    return 1 / (1 + np.exp(-scores))


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def by_output(pool: str, scores: Array) -> Array:
    """The pooled scores, [n] or [n, outputs]."""
    if scores.ndim == 1:
        return pooled(scores.tolist(), pool)
    return np.stack([pooled(column.tolist(), pool) for column in scores.T], 1)


LINKS: dict[str, Callable[[Array], Array]] = {
    "none": lambda scores: scores, "sigmoid": sigmoid, "softmax": softmax,
}  # fmt: skip


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "tanh": np.tanh,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2,
}


def scores_by_definition(rule: Any, numbers: Any) -> Array:
    """The scores of numbers [n, columns] of a `ScoreRule`."""
    rows = np.asarray(numbers, np.float64).reshape(-1, rule.columns)
    if rule.units is not None:
        weights = np.frombuffer(rule.units.weights, np.float32).reshape(-1, rule.columns)
        rows = ACTIVATIONS[rule.units.activation](rows) @ weights.astype("f8").T
        if rule.units.biases:
            rows = rows + np.frombuffer(rule.units.biases, np.float32)
    if rule.over == "softmax":
        half = rows.shape[1] // 2
        rows = attended(rows[:, :half], rows[:, half:], rule.window) + rule.bias
    elif rule.over == "max":
        rows = multimax(rows) + rule.bias
    elif rows.shape[1] == 1:
        rows = rows[:, 0]
    return by_output(rule.pool, LINKS[rule.link](rows))
