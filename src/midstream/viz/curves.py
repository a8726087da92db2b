"""Lines over one axis, such as d′ by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.viz.chart import Chart
from midstream.viz.color_scale import MOST, Floats, read_numbers, read_texts, written
from midstream.viz.figure_style import CHARACTER, COLUMN, INK, PAGE, SOFT, short, spread
from midstream.viz.markup import visible
from midstream.viz.picture import columns_of
from midstream.viz.theme import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Places up to which values have points, and ranges bars; more have lines and bands alone.
_MOST_POINTS = 100


@dataclass(frozen=True)
class CurvePanel:
    """Lines over one axis."""

    title: str
    x: Floats
    lines: dict[str, Floats]
    background: dict[str, Floats]
    ranges: dict[str, Floats]  # [2, n], by the names of lines
    labels: list[str] | None  # of the places, in place of numbers
    titles: tuple[str, str]  # of x and of the values
    fmt: str
    marked: float | None
    level: float | None
    is_log: bool

    @property
    def text(self) -> str:
        every = {**self.lines, **self.background}
        rows = [[self.titles[0] or "x", *(self._told(name) for name in every)]]
        places = self.labels or [written(float(at), "g") for at in self.x]
        rows += [
            [place, *(self._value(name, line, n) for name, line in every.items())]
            for n, place in enumerate(places)
        ]
        return (f"{self.title}\n" if self.title else "") + columns_of(rows)

    def _told(self, name: str) -> str:
        return f"{name} (from, to)" if name in self.ranges else name

    def _value(self, name: str, line: Floats, place: int) -> str:
        value = written(float(line[place]), self.fmt)
        if name not in self.ranges:
            return value
        low, high = self.ranges[name][:, place].tolist()
        return f"{value} ({written(low, self.fmt)}, {written(high, self.fmt)})"

    @property
    def size(self) -> tuple[float, float]:
        if self.labels is None:
            return COLUMN, 2.3
        below = CHARACTER * max(map(len, self.labels), default=0)
        return min(max(0.13 * len(self.x) + 0.9, COLUMN), PAGE), 2.2 + below

    def draw(self, axes: Axes) -> None:
        axes.grid(axis="y")
        if self.is_log and any((line > 0).any() for line in self.lines.values()):
            axes.set_yscale("log", nonpositive="clip")
        if self.level is not None:
            axes.axhline(self.level, color=SOFT, linewidth=0.8, linestyle=(0, (3, 4)))
        if self.marked is not None:
            axes.axvline(self.marked, color=INK, alpha=0.55, linewidth=0.8)
            name = f"{self.titles[0]} {written(self.marked, 'g')}".strip()
            right = self.marked > (self.x[0] + self.x[-1]) / 2
            axes.annotate(
                name, (self.marked, 1), (-3 if right else 3, -2), ("data", "axes fraction"),
                "offset points", ha="right" if right else "left", va="top", fontsize="small",
                parse_math=False,
            )  # fmt: skip
        for name, (color, _, dashes) in zip(self.lines, LINES, strict=False):
            self._draw_line(axes, name, color, (0, dashes) if dashes else "-")
        names = list(self.background)
        told = ", ".join(names) if len(names) <= 2 else f"{len(names)} more"
        for nth, line in enumerate(self.background.values()):
            label = "_" if nth else told  # the first stands for all
            style: dict[str, Any] = {"color": SOFT, "alpha": 0.4, "linewidth": 0.7, "zorder": 1.5}
            axes.plot(self.x, np.clip(line, -MOST, MOST), label=label, **style)
        if len(self.lines) > 1 or names:
            for text in axes.legend().get_texts():
                text.set_parse_math(False)
        axes.set_xlabel(self.titles[0], parse_math=False)
        axes.set_ylabel(self.titles[1], parse_math=False)
        self._label(axes)

    def _draw_line(self, axes: Axes, name: str, color: str, style: Any) -> None:
        line = np.clip(self.lines[name], -MOST, MOST)
        is_short = len(self.x) <= _MOST_POINTS
        if name in self.ranges:
            low, high = self.ranges[name]
            if is_short:
                bars: dict[str, Any] = {
                    "ecolor": color,
                    "elinewidth": 0.8,
                    "capthick": 0.8,
                    "label": "_",
                }
                axes.errorbar(self.x, line, [line - low, high - line], fmt="none", **bars)
            else:
                axes.fill_between(self.x, low, high, color=color, alpha=0.18, linewidth=0)
        marker = "o" if is_short else ""
        (drawn,) = axes.plot(self.x, line, color=color, linestyle=style, marker=marker)
        # A name that begins with an underscore is left out of legends.
        drawn.set_label(f" {name}" if name.startswith("_") else name)

    def _label(self, axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        if self.labels is None:
            whole = bool((self.x == np.round(self.x)).all())
            axes.xaxis.set_major_locator(
                MaxNLocator(7, integer=whole, steps=[1, 2, 5, 10], min_n_ticks=1)
            )
            return
        room = axes.get_window_extent().width / axes.figure.dpi
        places = spread(self.labels, room / 0.12)
        names = [short(self.labels[place]) for place in places]
        is_upright = sum(len(name) + 1 for name in names) * CHARACTER > room
        axes.set_xticks(self.x[places], names, rotation=90 if is_upright else 0)
        for label in axes.get_xticklabels():
            label.set_parse_math(False)


def curve(
    x: Any,
    series: Mapping[str, Any],
    *,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    fmt: str = ".3g",
    background: Mapping[str, Any] | None = None,
    ranges: Mapping[str, Any] | None = None,
    labels: Sequence[Any] | None = None,
    marked: float | None = None,
    level: float | None = None,
    log: bool = False,
) -> Chart:
    """Draw lines over one axis.

    Args:
        x: numbers along the axis, ascending, such as layers or strengths.
        series: the values of each line by its name, as many as `x`; NaN is a gap. At most six.
        title: title of the picture.
        x_title: what `x` is, such as "layer".
        y_title: what the values are, with their unit.
        fmt: format of the values as text, as for `format`.
        background: further lines, thin and grey, by name.
        ranges: for some of the lines (lowest, highest) around each value, as [2, n]: error bars, or
            a band behind more than 100 values.
        labels: texts for the places along the axis, such as tokens; None: the numbers.
        marked: a number on the axis to mark by a vertical line.
        level: a value to mark by a dashed horizontal line, such as guessing.
        log: whether the values' axis is logarithmic.

    Raises:
        SpecError: sizes that do not fit, `x` that does not ascend, ranges without their values, or
            more than six lines.
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
    names = None if labels is None else [visible(one) for one in read_texts(labels, "labels")]
    if names is not None and len(names) != len(places):
        raise SpecError("labels", f"expected {len(places)}, as `x` has, got {len(names)}")
    lines = _read_lines("series", series, len(places))
    panel = CurvePanel(
        visible(title),
        places,
        lines,
        _read_lines("background", background or {}, len(places)),
        _read_ranges(ranges or {}, lines),
        names,
        (visible(x_title), visible(y_title)),
        fmt,
        marked,
        level,
        log,
    )
    return Chart(panel.title, (panel,))


def _read_lines(path: str, series: Mapping[str, Any], count: int) -> dict[str, Floats]:
    lines = {}
    for name, values in series.items():
        lines[visible(str(name))] = line = read_numbers(values, f"{path}[{name!r}]", 1)
        if len(line) != count:
            raise SpecError(
                f"{path}[{name!r}]", f"expected {count} values, as `x` has, got {len(line)}"
            )
    return lines


def _read_ranges(ranges: Mapping[str, Any], lines: Mapping[str, Floats]) -> dict[str, Floats]:
    found = {}
    for name, values in ranges.items():
        path, shown = f"ranges[{name!r}]", visible(str(name))
        if shown not in lines:
            raise SpecError(path, f"there is no such line; there are {', '.join(lines)}")
        found[shown] = both = read_numbers(values, path, 2)
        line = lines[shown]
        if both.shape != (2, len(line)):
            got = list(both.shape)
            raise SpecError(path, f"expected [2, {len(line)}], lowest and highest, got {got}")
        if np.any(both[0] > line) or np.any(both[1] < line):
            raise SpecError(path, "expected lowest ≤ value ≤ highest at each place")
    return found
