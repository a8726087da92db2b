"""Scores of rows by a probe, in float64, and of texts, from those of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.intervals import Floats
from midstream.plan.probe import Probe
from midstream.plan.vectors.vector import Vector

POOLS = ("mean", "max", "last")
REDUCTIONS = ("", "mean", "last")


def score_texts(probe: Probe, rows: NDArray[Any], owners: Indices, pool: str) -> Floats:
    """Return the score of each text, as the engine computes it, but for the probe's own pool.

    Args:
        rows: [n, layers · width].
        owners: int64 [n], ascending from 0 without a gap.
        pool: how the scores of a text's rows become one; an attention probe has its own way.

    Returns:
        float64 [texts], or of classes [texts, classes], with their link.
    """
    if probe.attention_pool is None:
        return pooled(score_rows(probe, rows), owners, pool)
    wide, starts = rows.astype(np.float64), _starts(owners)
    logits = wide @ _matrix(probe.attention_pool.query).T
    values = wide @ _matrix(probe.attention_pool.value).T
    weights = np.exp(logits - np.maximum.reduceat(logits, starts)[owners])
    sums = [np.add.reduceat(part, starts) for part in (weights * values, weights)]
    scores: Floats = (sums[0] / sums[1]).sum(1) + probe.bias
    return scores


def score_rows(probe: Probe, rows: NDArray[Any]) -> Floats:
    """Return the score of each row [n, layers · width], float64 [n] or [n, classes]."""
    wide = rows.astype(np.float64)
    if probe.classes is not None:
        outputs = wide @ _matrix(probe.classes.weights).T + probe.classes.bias.numpy()
        shares = np.exp(outputs - outputs.max(1, keepdims=True))
        linked: Floats = shares / shares.sum(1, keepdims=True)
        return linked if probe.link == "softmax" else outputs
    if probe.mlp is not None:
        units = wide @ _matrix(probe.mlp.hidden).T + probe.mlp.hidden_bias.numpy()
        # Those of scikit-learn's networks.
        active = np.tanh(units) if probe.mlp.activation == "tanh" else np.maximum(units, 0)
        scores: Floats = active @ probe.mlp.output.numpy().astype(np.float64) + probe.bias
        return scores
    vectors: Any = probe.direction if isinstance(probe.direction, tuple) else (probe.direction,)
    linear: Floats = wide @ _matrix(vectors).reshape(-1) + probe.bias
    return linear


def pooled(scores: Floats, owners: Indices, pool: str) -> Floats:
    """Return the score of each text from those of its rows.

    Args:
        scores: [n], or [n, classes].
        owners: int64 [n], ascending from 0 without a gap.
        pool: "mean", "max" or "last".
    """
    starts = _starts(owners)
    if pool == "last":
        lasts: Floats = scores[np.append(starts[1:], len(owners)) - 1]
        return lasts
    if pool == "max":
        highest: Floats = np.maximum.reduceat(scores, starts)
        return highest
    means: Floats = (np.add.reduceat(scores, starts).T / np.bincount(owners)).T
    return means


def reduce_rows(rows: NDArray[Any], owners: Indices, reduce: str) -> tuple[NDArray[Any], Indices]:
    """Return a row for each text, and its text: the "mean", or the "last"; "" all rows."""
    if not reduce or not len(owners):
        return rows, owners
    starts = _starts(owners)
    texts = owners[starts]
    if reduce == "last":
        return rows[np.append(starts[1:], len(owners)) - 1], texts
    counts = np.diff(np.append(starts, len(owners)))
    return np.add.reduceat(rows.astype(np.float64), starts, axis=0) / counts[:, None], texts


def _starts(owners: Indices) -> Indices:
    """Return the first index of each text's rows."""
    starts: Indices = np.flatnonzero(np.diff(owners, prepend=-1))
    return starts


def _matrix(rows: Sequence[Vector]) -> Floats:
    return np.stack([row.numpy() for row in rows]).astype(np.float64)
