"""The norms of a store's rows, drawn: by layer, and by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midstream.tools.inspect.canvas import INK, Canvas, Point, make_canvas
from midstream.tools.inspect.norms import Norms, Spread

WIDTH, HEIGHT = 1000, 450
COLORS = ("#2f6db5", "#d1603d", "#3a9a66", "#8a5fb0", "#b08a1f", "#5d6570")
_FAINT = "#dfe3e8"
_TOP, _BOTTOM = 100, 60
# Round values within a power of ten; as many as are needed.
_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))


@dataclass(frozen=True, slots=True)
class _Panel:
    """Where one of the charts is, and how its values become places in it.

    Attributes:
        left, right: pixels.
        first, last: x at these.
        low, high: log10 of the values at the bottom and the top.
    """

    left: float
    right: float
    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        # A single one is in the middle.
        span = self.last - self.first
        share = (value - self.first) / span if span else 0.5
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP)


def draw(norms: Norms, path: Path) -> None:
    """Draws both charts into a file.

    Raises:
        UnsupportedError: neither SVG nor PNG, or Pillow is missing.
        OSError: the file cannot be written.
    """
    canvas = make_canvas(path, WIDTH, HEIGHT)
    title = f"Norms of {norms.rows:,} rows, codec {norms.codec}"
    if norms.not_finite:
        title += f"; {norms.not_finite:,} others are not finite"
    canvas.text((20, 26), title, size=16)
    canvas.text((20, 44), "line: median; bands: 25 to 75 and 5 to 95 percent of the rows", size=11)
    half = WIDTH / 2
    _draw_panel(canvas, 60, half - 30, norms.by_layer, "by layer", "layer")
    if norms.by_position:
        title, axis = f"by position, {norms.site}", "position in the request"
        _draw_panel(canvas, half + 50, WIDTH - 40, norms.by_position, title, axis)
    canvas.save(path)


def _draw_panel(
    canvas: Canvas, left: float, right: float, spreads: Sequence[Spread], title: str, axis: str
) -> None:
    values = np.concatenate([spread.percentiles.ravel() for spread in spreads])
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1.0, 1.0)
    panel = _Panel(
        left,
        right,
        min(float(spread.x[0]) for spread in spreads),
        max(float(spread.x[-1]) for spread in spreads),
        math.log10(low) - 0.05,
        math.log10(high) + 0.05,
    )
    canvas.text(((left + right) / 2, _TOP - 28), title, size=13, anchor="middle")
    _draw_levels(canvas, panel)
    for tick in _ticks(panel.first, panel.last):
        canvas.text((panel.x(tick), HEIGHT - _BOTTOM + 18), f"{tick:g}", size=11, anchor="middle")
    canvas.text(((left + right) / 2, HEIGHT - _BOTTOM + 36), axis, size=11, anchor="middle")
    for number, spread in enumerate(spreads):
        color = COLORS[number % len(COLORS)]
        _draw_spread(canvas, panel, spread, color)
        if len(spreads) > 1 or spread.name.startswith("layer"):
            share = (number + 0.5) / len(spreads)
            place = (left + share * (right - left), _TOP - 10)
            canvas.text(place, spread.name, size=11, anchor="middle", color=color)


def _draw_levels(canvas: Canvas, panel: _Panel) -> None:
    """Lines at round values, and what they are."""
    for value in _levels(panel.low, panel.high):
        y = panel.y(value)
        canvas.line([(panel.left, y), (panel.right, y)], _FAINT, 1)
        canvas.text((panel.left - 6, y + 4), f"{value:g}", size=11, anchor="end")
    base = HEIGHT - _BOTTOM
    canvas.line([(panel.left, base), (panel.right, base)], INK, 1)


def _draw_spread(canvas: Canvas, panel: _Panel, spread: Spread, color: str) -> None:
    # Rows of nothing have no place on this axis.
    percentiles = np.maximum(spread.percentiles, 10**panel.low)
    places = [panel.x(float(x)) for x in spread.x]
    if len(places) == 1:
        # Wide enough to be seen.
        places = [places[0] - 12, places[0] + 12]
        percentiles = np.repeat(percentiles, 2, axis=0)
    lines: list[list[Point]] = [
        [(x, panel.y(float(value))) for x, value in zip(places, column, strict=True)]
        for column in percentiles.T
    ]
    canvas.area([*lines[0], *reversed(lines[4])], color, 0.12)
    canvas.area([*lines[1], *reversed(lines[3])], color, 0.22)
    canvas.line(lines[2], color, 1.8)


def _levels(low: float, high: float) -> list[float]:
    """Three to about eight round values between two, which are given as log10."""
    for steps in _STEPS:
        powers = range(math.floor(low), math.ceil(high) + 1)
        found = [step * 10.0**power for power in powers for step in steps]
        found = [value for value in found if low <= math.log10(value) <= high]
        if len(found) >= 3:
            return found[:: 1 + len(found) // 9]
    # They are close together: steps of the same length are as good.
    step = 10 ** math.floor(math.log10(10**high - 10**low)) / 2
    first, last = math.ceil(10**low / step), math.floor(10**high / step)
    return [step * count for count in range(first, last + 1, 1 + (last - first) // 9)]


def _ticks(first: float, last: float) -> list[float]:
    """Up to about eight whole numbers."""
    step = max(1, math.ceil((last - first) / 8))
    for round_step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000):
        if round_step >= step:
            step = round_step
            break
    start = math.ceil(first / step) * step
    found = [float(value) for value in range(start, math.floor(last) + 1, step)]
    return found or [first]
