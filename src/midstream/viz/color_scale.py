"""Numbers of pictures: how they are read, written, and turned into colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.validation import at, kind, read_float32

NUM_BINS = 41
"""Colours of the diverging scale: bin 0 is the low end, 40 the high end, 20 the centre."""

MOST = 1e300
"""Larger numbers are drawn as this one: the distance of two of them is still a number."""

Floats = NDArray[np.float64]


def read_numbers(values: Any, path: str, dims: int) -> Floats:
    """Read nested lists, an array or a tensor of any float dtype as float64."""
    if hasattr(values, "detach"):  # a tensor, whose bfloat16 NumPy lacks
        values = values.detach().float().cpu().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        wanted = "rows of numbers" if dims == 2 else "numbers"
        raise SpecError(path, f"expected {wanted}: {error}") from None
    if array.ndim != dims and array.size:
        raise SpecError(path, f"expected {dims} dimensions, got shape {list(array.shape)}")
    return array.reshape((0,) * dims) if not array.size and array.ndim != dims else array


def read_texts(values: Any, path: str) -> list[str]:
    """Read labels: strings or numbers."""
    if isinstance(values, str):
        raise SpecError(path, "expected a list of labels, got one `str`")
    texts = []
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (str, int, float, np.number)):
            raise SpecError(f"{path}[{index}]", f"expected a label, got {kind(value)}")
        texts.append(value if isinstance(value, str) else f"{value}")
    return texts


def written(value: float, fmt: str) -> str:
    """Return a number as text with a true minus; `–` for NaN."""
    if math.isnan(value):
        return "–"
    try:
        text = format(float(value), fmt)
    except (TypeError, ValueError) as error:
        raise SpecError("fmt", f"expected a format such as '.2f', got {fmt!r}: {error}") from None
    is_zero = not text.strip("-+0.,% ")
    return text.replace("-", "" if is_zero else "−")


@dataclass(frozen=True, slots=True)
class ColorScale:
    """Maps numbers to bins of colours."""

    low: float  # at the low end, as all below
    high: float  # at the high end, as all above
    center: float | None  # with the neutral colour; None: colours rise from neutral at `low`

    @staticmethod
    def of(values: Floats, center: float | None, limits: Any = None) -> ColorScale:
        """Return the scale of finite values or limits; with a centre, by the larger distance."""
        if center is not None:
            with at("center"):
                center = read_float32(center)
        low, high = _ends(values) if limits is None else _read_limits(limits)
        if center is None:
            return ColorScale(low, high, None)
        reach = max(abs(low - center), abs(high - center))
        return ColorScale(center - reach, center + reach, center)

    def bin(self, value: float) -> int | None:
        """Return the bin of a number, 0 to 40; None for NaN."""
        if math.isnan(value):
            return None
        span = self.high - self.low
        share = (min(max(value, self.low), self.high) - self.low) / span if span > 0 else None
        middle = NUM_BINS // 2
        if self.center is None:
            return middle + round((1.0 if share is None else share) * middle)
        return round((0.5 if share is None else share) * (NUM_BINS - 1))

    def style(self, value: float) -> str:
        """Return the class of a number in the style sheet; empty for NaN."""
        bin_index = self.bin(value)
        return "" if bin_index is None else f"b{bin_index}"

    @property
    def ends(self) -> tuple[float, float]:
        """The values at the ends, which differ: equal values have the centre's colour or the high
        end's.
        """
        if self.low < self.high:
            return self.low, self.high
        pad = max(0.5, 0.5 * abs(self.low))
        return self.low - pad, self.high + (0 if self.center is None else pad)

    def legend(self, values: Floats) -> tuple[float, Sequence[int]]:
        """Return the lowest value of a legend and its bins: those below the centre only if some of
        the values are.
        """
        is_below = self.center is not None and bool((values < self.center).any())
        low = self.low if is_below or self.center is None else self.center
        return low, range(0 if is_below else NUM_BINS // 2, NUM_BINS, 2)


def _ends(values: Floats) -> tuple[float, float]:
    finite = np.clip(values[np.isfinite(values)], -MOST, MOST)
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _read_limits(limits: Any) -> tuple[float, float]:
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        raise SpecError("limits", f"expected a pair (low, high), got {limits!r}")
    bounds = []
    for index, value in enumerate(limits):
        with at(f"limits[{index}]"):
            bounds.append(read_float32(value))
    if bounds[0] >= bounds[1]:
        raise SpecError("limits", f"expected low < high, got {limits!r}")
    return bounds[0], bounds[1]
