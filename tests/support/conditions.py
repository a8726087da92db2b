"""Conditions of probes by their definition, over all scores at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pooled(scores: Sequence[float], pool: str) -> NDArray[np.float64]:
    """The pooled score of each token: float64."""
    every = np.array(scores, np.float64)
    kind, _, number = pool.partition(":")
    if kind == "none":
        return every
    parts = [every[: nth + 1] for nth in range(len(every))]
    if kind == "max":
        return np.array([part.max() for part in parts])
    if kind == "mean":
        return np.array([part[-int(number) :].mean() for part in parts])
    assert kind == "ema"
    decay = float(number)
    found = []
    for part in parts:
        # The first score has the weight of all that would have come before it.
        weights = (1 - decay) * decay ** np.arange(len(part))[::-1]
        weights[0] = decay ** (len(part) - 1)
        found.append(float(weights @ part))
    return np.array(found)


def first_met(
    scores: Sequence[float],
    *,
    above: float | None = None,
    below: float | None = None,
    for_: int = 1,
    pool: str = "none",
) -> int | None:
    """The index of the score at which a condition is met first; None: it is never met."""
    values = pooled(scores, pool)
    beyond = values > above if above is not None else values < below
    for last in range(for_ - 1, len(beyond)):
        if beyond[last - for_ + 1 : last + 1].all():
            return last
    return None
