"""Rates and areas under a ROC curve, with confidence intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.validation import at, read_float32

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A number with its confidence interval; NaN where there is nothing to count."""

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


_NOTHING = Interval(np.nan, np.nan, np.nan)


def read_share(path: str, value: Any) -> float:
    """Read a number between 0 and 1, both excluded."""
    with at(path):
        share = read_float32(value)
        if not 0 < share < 1:
            raise SpecError("", f"expected a number between 0 and 1, got {share:g}")
    return share


def rate_of(flags: NDArray[np.bool_], confidence: float) -> Interval:
    """Return the share of what is flagged, with the interval of Clopper and Pearson 1934."""
    from scipy.stats import binomtest

    if not len(flags):
        return _NOTHING
    count = int(flags.sum())
    interval = binomtest(count, len(flags)).proportion_ci(confidence, method="exact")
    return Interval(count / len(flags), float(interval.low), float(interval.high))


def auc_of(positive: Floats, negative: Floats, confidence: float) -> Interval:
    """Return the probability that a positive scores higher than a negative, a tie being half.

    The interval is method 5 of Newcombe 2006 (doi:10.1002/sim.2324): the areas θ for which the
    area is within z standard errors, after Hanley and McNeil 1982, of θ. It is of independent
    texts, and is not empty at an area of 1.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    if not len(positive) or not len(negative):
        return _NOTHING
    others = np.sort(negative)
    wins = np.searchsorted(others, positive, "left") + np.searchsorted(others, positive, "right")
    area = float(wins.mean() / (2 * len(others)))
    pairs, others_mean = len(positive) * len(others), (len(positive) + len(others)) / 2 - 1
    z = float(norm.ppf((1 + confidence) / 2))

    def beyond(theta: float) -> float:
        spread = 1 + others_mean * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return float((area - theta) ** 2 - z**2 * theta * (1 - theta) * spread / pairs)

    # At 0 and 1 the variance is 0, so that `beyond` is 0 or more there, and 0 or less at the area.
    low = 0.0 if area <= 0 else float(brentq(beyond, 0, area)) if area < 1 else _root(beyond, 0, 1)
    high = 1.0 if area >= 1 else float(brentq(beyond, area, 1)) if area > 0 else _root(beyond, 1, 0)
    return Interval(area, low, high)


def _root(beyond: Any, far: float, at_area: float) -> float:
    """Return the root next to an area of 0 or 1, which is a root as well."""
    from scipy.optimize import brentq

    near = at_area + (far - at_area) * 1e-12
    return float(brentq(beyond, far, near))
