"""Scores of rows by a probe, in float64, and of texts, from those of their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.intervals import Floats
from midstream.plan.probe import Probe

POOLS = ("mean", "max", "last")
REDUCTIONS = ("", "mean", "last")


def score_rows(probe: Probe, rows: NDArray[Any]) -> Floats:
    """Return the score of each row [n, layers · width], as the engine computes it, float64 [n]."""
    wide = rows.astype(np.float64)
    if probe.mlp is not None:
        from scipy.special import erf

        hidden = np.stack([row.numpy() for row in probe.mlp.hidden]).astype(np.float64)
        units = wide @ hidden.T + probe.mlp.hidden_bias.numpy()
        activations: dict[str, Any] = {
            "relu": lambda x: np.maximum(x, 0),
            "tanh": np.tanh,
            "silu": lambda x: x / (1 + np.exp(-x)),
            "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
        }
        activated = activations[probe.mlp.activation](units)
        scores: Floats = activated @ probe.mlp.output.numpy().astype(np.float64) + probe.bias
        return scores
    vectors: Any = probe.direction if isinstance(probe.direction, tuple) else (probe.direction,)
    joined = np.concatenate([vector.numpy() for vector in vectors]).astype(np.float64)
    linear: Floats = wide @ joined + probe.bias
    return linear


def pooled(scores: Floats, owners: Indices, pool: str) -> Floats:
    """Return the score of each text from those of its rows.

    Args:
        scores: [n].
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
    means: Floats = np.add.reduceat(scores, starts) / np.bincount(owners)
    return means


def reduced(rows: NDArray[Any], owners: Indices, reduce: str) -> tuple[NDArray[Any], Indices]:
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
