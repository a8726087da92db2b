"""Lines over one axis, such as d′ by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.viz.chart import Chart, Panel
from midstream.viz.color_scale import MOST, Floats, read_numbers, read_texts, written
from midstream.viz.figure_style import COLUMN, PAGE, inches_of, label
from midstream.viz.markup import visible
from midstream.viz.theme import COLORS, LINES

# Places up to which values have points, and ranges bars; more have lines and bands alone.
_MOST_POINTS = 100
_FOOT = 0.1  # part of the height of the axes, in which the name of a marked place is
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_INK, _SOFT = COLORS["ink"][0], COLORS["soft"][0]


@dataclass(frozen=True)
class _Lines:
    """What a curve draws."""

    x: Floats
    lines: dict[str, Floats]
    ranges: dict[str, Floats]  # [2, n], by the names of lines
    labels: list[str] | None  # of the places, in place of numbers
    titles: tuple[str, str]  # of x and of the values
    marked: float | None
    level: float | None
    is_log: bool

    def draw(self, axes: Any) -> None:
        axes.grid(axis="y")
        axes.set_xlabel(self.titles[0], parse_math=False)
        axes.set_ylabel(self.titles[1], parse_math=False)
        if self.is_log and any((line > 0).any() for line in self.lines.values()):
            from matplotlib.ticker import FuncFormatter, LogFormatter

            axes.set_yscale("log", nonpositive="clip")
            # matplotlib's own are formulas, which the style shows as they are written.
            axes.yaxis.set_major_formatter(FuncFormatter(_power))
            axes.yaxis.set_minor_formatter(LogFormatter())
        if self.level is not None:
            axes.axhline(self.level, color=_SOFT, linewidth=0.8, linestyle=(0, (3, 4)))
        for index, name in enumerate(self.lines):
            self._draw_line(axes, index, name)
        if self.marked is not None:
            self._mark(axes, self.marked)
        if len(self.lines) > 1:
            for text in axes.legend().get_texts():
                text.set_parse_math(False)
        if self.labels is not None:
            label(axes, "x", self.labels)
        elif (self.x == np.round(self.x)).all():
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)

    def _draw_line(self, axes: Any, index: int, name: str) -> None:
        line, x = self.lines[name].clip(-MOST, MOST), self.places
        is_short = len(x) <= _MOST_POINTS
        if index >= len(LINES):
            more = len(self.lines) - len(LINES)
            # One name for all grey lines: others that begin with an underscore have none.
            shown = "_" if index > len(LINES) else f"{more} more"
            axes.plot(x, line, color=_SOFT, alpha=0.4, linewidth=0.7, zorder=1.5, label=shown)
            return
        color, _, dashes, marker = LINES[index]
        if name in self.ranges and is_short:
            errors = np.abs(self.ranges[name] - line)
            bars = {"elinewidth": 0.8, "capthick": 0.8, "label": "_"}
            axes.errorbar(x, line, errors, fmt="none", ecolor=color, **bars)
        elif name in self.ranges:
            axes.fill_between(x, *self.ranges[name], color=color, alpha=0.18, linewidth=0)
        shown = f" {name}" if name.startswith("_") else name
        style = {"linestyle": (0, dashes) if dashes else "-", "marker": marker if is_short else ""}
        axes.plot(x, line, color=color, label=shown, **style)

    def _mark(self, axes: Any, marked: float) -> None:
        at = float(np.interp(marked, self.x, self.places))
        axes.axvline(at, color=_INK, alpha=0.55, linewidth=0.8)
        is_right = at > (self.places[0] + self.places[-1]) / 2
        place = {"xytext": (-3 if is_right else 3, 2), "textcoords": "offset points"}
        where = {"ha": "right" if is_right else "left", "va": "bottom", "fontsize": "small"}
        name = f"{self.titles[0]} {written(marked, 'g')}".strip()
        foot = 0.0
        if self.level is not None:
            # A level near the foot would strike the name through: the name stands on it.
            axes.autoscale_view()  # matplotlib does so when it draws
            share = (axes.transScale + axes.transLimits).transform((at, self.level))[1]
            foot = share if 0 < share < _FOOT else 0.0
        low = {"xy": (at, foot), "xycoords": ("data", "axes fraction")}
        axes.annotate(name, parse_math=False, **low, **place, **where)

    @property
    def places(self) -> Floats:
        """Where the values are along the axis: labelled ones are side by side."""
        return self.x if self.labels is None else np.arange(len(self.x), dtype=np.float64)


def _power(value: float, _: Any) -> str:
    """Return a power of ten, a tick of a logarithmic axis, as text."""
    exponent = round(np.log10(value)) if value > 0 else 0
    return f"10{str(exponent).translate(_RAISED)}"


def curve(
    x: Any,
    series: Mapping[str, Any],
    *,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    fmt: str = ".3g",
    ranges: Mapping[str, Any] | None = None,
    labels: Sequence[Any] | None = None,
    marked: float | None = None,
    level: float | None = None,
    log: bool = False,
) -> Chart:
    """Draw lines over one axis.

    Args:
        x: numbers along the axis, ascending, such as layers or strengths.
        series: the values of each line by its name, as many as `x`; NaN is a gap. More than six
            lines are thin and grey.
        title: title of the picture.
        x_title: what `x` is, such as "layer".
        y_title: what the values are, with their unit.
        fmt: format of the values as text, as for `format`.
        ranges: for some of the lines (lowest, highest) around each value, [2, n]: error bars, or a
            band behind more than 100 values.
        labels: texts for the places, such as tokens, side by side; None: numbers.
        marked: a number on the axis to mark by a vertical line.
        level: a value to mark by a dashed horizontal line, such as guessing.
        log: whether the values' axis is logarithmic.

    Raises:
        SpecError: sizes that do not fit, `x` that does not ascend, or ranges without their values.
    """
    places = read_numbers(x, "x", 1)
    if not len(places) or not np.all(np.isfinite(places)) or np.any(np.diff(places) <= 0):
        raise SpecError("x", "expected one or more finite numbers that ascend")
    if max(abs(places)) > MOST:
        raise SpecError("x", f"expected numbers within ±{MOST:g}, got {max(abs(places)):g}")
    names = None if labels is None else [visible(text) for text in read_texts(labels, "labels")]
    if names is not None and len(names) != len(places):
        raise SpecError("labels", f"expected {len(places)}, as `x` has, got {len(names)}")
    lines, around = {}, {}
    for name, values in series.items():
        lines[visible(str(name))] = line = read_numbers(values, f"series[{name!r}]", 1)
        if len(line) != len(places):
            expected = f"expected {len(places)} values, as `x` has, got {len(line)}"
            raise SpecError(f"series[{name!r}]", expected)
    for name, values in (ranges or {}).items():
        path, own = f"ranges[{name!r}]", visible(str(name))
        if own not in lines:
            raise SpecError(path, f"there is no such line; there are {', '.join(lines)}")
        around[own] = both = read_numbers(values, path, 2)
        if both.shape != (2, len(places)):
            raise SpecError(path, f"expected [2, {len(places)}], got {list(both.shape)}")
        if np.any(both[0] > lines[own]) or np.any(both[1] < lines[own]):
            raise SpecError(path, "expected lowest ≤ value ≤ highest at each place")
    titles = (visible(x_title), visible(y_title))
    drawn = _Lines(places, lines, around, names, titles, marked, level, log)
    columns = [[titles[0] or "x", *(names or [written(float(place), "g") for place in places])]]
    for name, line in lines.items():
        columns.append([name, *(written(float(value), fmt) for value in line)])
        for end, line in zip(("from", "to"), around.get(name, ()), strict=False):
            columns.append([end, *(written(float(value), fmt) for value in line)])
    width = COLUMN if names is None else min(max(0.13 * len(places) + 0.9, COLUMN), PAGE)
    size = width, 2.3 + (0 if names is None else inches_of(names))
    panel = Panel(visible(title), size, list(zip(*columns, strict=True)), drawn.draw)
    return Chart(panel.title, (panel,))
