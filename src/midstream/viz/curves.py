"""Lines over one axis, such as AUC by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.viz.color_scale import MOST, Floats, read_numbers, written
from midstream.viz.markup import escape, tag
from midstream.viz.picture import Picture, columns_of, figure, readout
from midstream.viz.theme import LINES


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The plotting area of a curve, and its mapping from values to coordinates."""

    left_value: float
    right_value: float
    low: float
    high: float
    width: float = 540
    height: float = 270
    left: float = 56
    right: float = 16
    top: float = 22
    bottom: float = 46

    def x(self, value: float) -> float:
        span = self.right_value - self.left_value
        share = (value - self.left_value) / span if span > 0 else 0.5
        return self.left + (self.width - self.left - self.right) * share

    def y(self, value: float) -> float:
        share = (min(max(value, -MOST), MOST) - self.low) / (self.high - self.low)
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share


def curve(
    x: Any,
    series: Mapping[str, Any],
    *,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    fmt: str = ".3g",
    background: Mapping[str, Any] | None = None,
    marked: float | None = None,
    level: float | None = None,
) -> Picture:
    """Draw lines over one axis; each place tells all values to mouse, touch and keyboard.

    Args:
        x: numbers along the axis, ascending, such as layers or strengths.
        series: the values of each line by its name, as many as `x`; NaN is a gap. At most six.
        title: title of the picture.
        x_title: what `x` is, such as "layer".
        y_title: what the values are, with their unit.
        fmt: format of the values, as for `format`.
        background: further lines, thin and grey, by name.
        marked: a number on the axis to mark by a vertical line.
        level: a value to mark by a dashed horizontal line, such as guessing.

    Raises:
        SpecError: sizes that do not fit, `x` that does not ascend, or more than six lines.
    """
    places = read_numbers(x, "x", 1)
    if not len(places) or not np.all(np.isfinite(places)) or np.any(np.diff(places) <= 0):
        raise SpecError("x", "expected one or more finite numbers that ascend")
    if max(abs(places)) > MOST:
        raise SpecError("x", f"expected numbers within ±{MOST:g}, got {max(abs(places)):g}")
    if len(series) > len(LINES):
        raise SpecError(
            "series", f"expected at most {len(LINES)} lines, got {len(series)}; use `background`"
        )
    lines = _read_lines("series", series, len(places))
    behind = _read_lines("background", background or {}, len(places))
    every = {**lines, **behind}
    area = _area(places, list(every.values()), level)
    parts = [_grid(area), _axis(area, places, x_title)]
    if y_title:
        at_left = f"rotate(-90 13 {area.height / 2:g})"
        parts.append(_text(13, area.height / 2, y_title, "middle", transform=at_left))
    if level is not None:
        y = f"{area.y(level):.1f}"
        ends = {"x1": area.left, "x2": area.width - area.right}
        parts.append(tag("line", cls="level", y1=y, y2=y, **ends))
    if marked is not None:
        at = f"{area.x(marked):.1f}"
        ends = {"y1": area.top, "y2": area.height - area.bottom}
        parts.append(tag("line", cls="mark", x1=at, x2=at, **ends))
        label = f"{x_title} {_plain(marked)}".strip()
        parts.append(_text(area.x(marked), area.top - 7, label, "name middle"))
    parts += [tag("path", d=_path(area, places, line), cls="back") for line in behind.values()]
    for index, line in enumerate(lines.values()):
        parts.append(tag("path", d=_path(area, places, line), cls=f"line{index}"))
        parts += [
            tag("circle", cx=f"{area.x(at):.1f}", cy=f"{area.y(v):.1f}", r="3", cls=f"dot{index}")
            for at, v in zip(places, line, strict=True)
            if math.isfinite(v) and len(places) <= 100
        ]
    parts.append(_bands(area, places, every, (x_title, fmt, title)))
    size = f"0 0 {area.width:g} {area.height:g}"
    svg = tag("svg", "".join(parts), "chart", viewBox=size)
    rows = [[x_title or "x", *every]]
    rows += [
        [_plain(at), *(written(line[n], fmt) for line in every.values())]
        for n, at in enumerate(places.tolist())
    ]
    foot = readout("a place") + _numbers(rows)
    body = figure(title, _keys(lines, behind) + svg + foot)
    return Picture(title, body, (f"{title}\n" if title else "") + columns_of(rows))


def _read_lines(path: str, series: Mapping[str, Any], count: int) -> dict[str, Floats]:
    lines = {}
    for name, values in series.items():
        lines[str(name)] = line = read_numbers(values, f"{path}[{name!r}]", 1)
        if len(line) != count:
            raise SpecError(
                f"{path}[{name!r}]", f"expected {count} values, as `x` has, got {len(line)}"
            )
    return lines


def _area(places: Floats, lines: Sequence[Floats], level: float | None) -> PlotArea:
    values = np.concatenate([*lines, [] if level is None else [level]]) if lines else np.array([])
    finite = np.clip(values[np.isfinite(values)], -MOST, MOST)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    margin = 0.07 * (high - low) or 0.5 * abs(high)
    # The steps of smaller numbers would be 0.
    margin = margin if margin > 1 / MOST else 0.5
    return PlotArea(float(places[0]), float(places[-1]), low - margin, high + margin)


def _text(x: float, y: float, words: str, cls: str, **attributes: Any) -> str:
    return tag("text", escape(words), x=f"{x:.1f}", y=f"{y:.1f}", cls=cls, **attributes)


def _plain(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def ticks(low: float, high: float) -> list[float]:
    """Return three to eight round numbers between two others."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * k for k in (0.1, 0.2, 0.5, 1, 2, 5) if span / (power * k) <= 7)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # A multiple of 0.1 has other digits at its end.
    digits = 12 - math.floor(math.log10(step))
    return [round(n * step, digits) for n in range(first, last + 1)]


def _grid(area: PlotArea) -> str:
    parts = []
    for value in ticks(area.low, area.high):
        y = f"{area.y(value):.1f}"
        ends = {"x1": area.left, "x2": area.width - area.right}
        parts.append(tag("line", cls="rule", y1=y, y2=y, **ends))
        parts.append(_text(area.left - 7, area.y(value) + 4, _plain(value), "end"))
    return "".join(parts)


def _axis(area: PlotArea, places: Floats, title: str) -> str:
    """Return labels at the places themselves, or at round numbers where there are many."""
    shown = places.tolist()
    if len(shown) > 12:
        shown = ticks(area.left_value, area.right_value)
    parts = [_text(area.x(v), area.height - area.bottom + 18, _plain(v), "middle") for v in shown]
    middle = (area.left + area.width - area.right) / 2
    return "".join(parts) + _text(middle, area.height - 6, title, "middle")


def _path(area: PlotArea, places: Floats, line: Floats) -> str:
    steps, is_drawing = [], False
    for at, value in zip(places, line, strict=True):
        if not math.isfinite(value):
            is_drawing = False
            continue
        steps.append(f"{'L' if is_drawing else 'M'}{area.x(at):.1f} {area.y(value):.1f}")
        is_drawing = True
    return " ".join(steps)


def _bands(
    area: PlotArea, places: Floats, lines: Mapping[str, Floats], names: tuple[str, str, str]
) -> str:
    """Return one transparent band for each place, which tells all values there."""
    x_title, fmt, title = names
    centers = [area.x(at) for at in places]
    edges = [(a + b) / 2 for a, b in zip(centers, centers[1:], strict=False)]
    edges = [area.left - 4, *edges, area.width - area.right + 4]
    parts = []
    for index, at in enumerate(places.tolist()):
        values = ", ".join(
            f"{name} {written(line[index], fmt)}"
            for name, line in lines.items()
            if not math.isnan(line[index])
        )
        label = f"{x_title} {_plain(at)}".strip() + f": {values or 'no value'}"
        place = {"x": f"{edges[index]:.1f}", "y": area.top}
        width, height = edges[index + 1] - edges[index], area.height - area.top - area.bottom
        size = {"width": f"{width:.1f}", "height": height}
        attributes = {"role": "option", "aria_label": label, **place, **size}
        tip = tag("title", escape(label))
        first = "0" if index == 0 else None
        parts.append(tag("rect", tip, "c", tabindex=first, **attributes))
    return tag(
        "g",
        "".join(parts),
        role="listbox",
        aria_label=title or "curve",
        aria_orientation="horizontal",
        data_columns=len(places),
        data_lm_suppress_shortcuts="true",
    )


def _keys(lines: Mapping[str, Floats], behind: Mapping[str, Floats]) -> str:
    def key(name: str, style: str) -> str:
        sample = tag("svg", tag("path", d="M0 4H26", cls=style), viewBox="0 0 26 8")
        return tag("span", sample + tag("span", escape(name)))

    parts = [key(name, f"line{index}") for index, name in enumerate(lines)]
    if behind:
        parts.append(key(", ".join(behind) if len(behind) <= 2 else f"{len(behind)} more", "back"))
    return tag("div", "".join(parts), "keys")


def _numbers(rows: Sequence[Sequence[str]]) -> str:
    head = tag("tr", "".join(tag("th", escape(name), scope="col") for name in rows[0]))
    body = "".join(
        tag("tr", "".join(tag("td", escape(value)) for value in row)) for row in rows[1:]
    )
    table = tag("div", tag("table", head + body, "numbers"), "scroll")
    return tag("details", tag("summary", "Numbers") + table)
