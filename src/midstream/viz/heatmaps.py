"""A value for each row and column, as colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.viz.chart import Chart, ColorBar
from midstream.viz.color_scale import MOST, ColorScale, Floats, read_numbers, read_texts, written
from midstream.viz.figure_style import CHARACTER, SOFT, color_map, short, spread
from midstream.viz.markup import visible
from midstream.viz.picture import columns_of
from midstream.viz.theme import ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

MOST_CELLS = 20_000


@dataclass(frozen=True)
class HeatmapPanel:
    """A matrix as coloured cells."""

    title: str
    values: Floats  # [rows, columns]
    rows: list[str]
    columns: list[str]
    titles: tuple[str, str]  # of the rows and of the columns
    bar_title: str
    scale: ColorScale
    fmt: str
    texts: list[list[str]] | None  # [rows, columns], in the cells
    marked: int | None  # a row
    is_rising: bool  # the first row is at the bottom

    @property
    def text(self) -> str:
        named = [[written(value, self.fmt) for value in line] for line in self.values]
        lines = [[n, *line] for n, line in zip(self.rows, self.texts or named, strict=True)]
        head = f"{self.titles[0]}↓ {self.titles[1]}→".strip(" ↓→")
        table = [[head, *self.columns], *(lines[::-1] if self.is_rising else lines)]
        return (f"{self.title}\n" if self.title else "") + columns_of(table)

    @property
    def size(self) -> tuple[float, float]:
        labels = CHARACTER * max(map(len, map(short, self.rows)), default=0)
        (width, height), longest = self._cell, max(map(len, map(short, self.columns)), default=0)
        most = 60.0 if self.texts else 5.4
        across = min(max(width * len(self.columns), 1.7), most)
        along = min(max(height * len(self.rows), 0.9), 5.5 if self.texts is None else 60.0)
        is_upright = longest * CHARACTER > across / max(len(self.columns), 1)
        below = CHARACTER * longest if is_upright else 0.15
        return across + labels + 1.15, along + below + 0.65

    @property
    def _cell(self) -> tuple[float, float]:
        """Width and height of a cell in inches, if there is space."""
        texts = [text for line in self.texts or () for text in line]
        longest = max(map(len, map(short, texts)), default=0)
        return (0.05 * longest + 0.08, 0.17) if self.texts else (0.15, 0.13)

    def draw(self, axes: Axes) -> tuple[ScalarMappable, ColorBar] | None:
        axes.set_ylabel(self.titles[0], parse_math=False)
        axes.set_xlabel(self.titles[1], parse_math=False)
        if not self.values.size:
            return None
        low, high = self.scale.ends
        # matplotlib leaves infinite values out.
        shown = np.where(np.isposinf(self.values), high, self.values)
        shown = np.clip(np.where(np.isneginf(shown), low, shown), -MOST, MOST)
        image = axes.imshow(
            shown,
            cmap=color_map(self.scale.center is not None),
            vmin=low,
            vmax=high,
            aspect="auto",
            interpolation="nearest",
            origin="lower" if self.is_rising else "upper",
        )
        if np.isnan(shown).any():  # empty cells are hatched
            axes.patch.set(hatch="//////", edgecolor="#d3cec6", linewidth=0, facecolor="none")
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0)
        self._label(axes)
        if self.marked is not None:
            from matplotlib.patches import Rectangle

            place, size = (-0.5, self.marked - 0.5), (len(self.columns), 1)
            row = Rectangle(place, *size, fill=False, edgecolor="black", linewidth=1, clip_on=False)
            axes.add_patch(row)
        for r, line in enumerate(self.texts or ()):
            for c, text in enumerate(line):
                red, green, blue, alpha = image.cmap(image.norm(shown[r, c]), bytes=True)
                color = ink_on((int(red), int(green), int(blue))) if alpha else SOFT
                told = axes.text(c, r, short(text), color=color, ha="center", va="center")
                told.set(fontsize="x-small", clip_on=True, parse_math=False, in_layout=False)
        beyond = shown[np.isfinite(shown)]
        ends = bool((beyond < low).any()), bool((beyond > high).any())
        extend = {(True, True): "both", (True, False): "min", (False, True): "max"}
        return image, ColorBar(self.bar_title, low, high, extend.get(ends, "neither"))

    def _label(self, axes: Axes) -> None:
        """Label as many rows and columns as there is space for."""
        size = axes.get_window_extent()
        width, height = size.width / axes.figure.dpi, size.height / axes.figure.dpi
        places = spread(self.rows, height / 0.12)
        if self.marked is not None and self.marked not in places:
            # Beside the marked row's label there is no space for another.
            step = places[1] - places[0] if len(places) > 1 else 1
            places = [one for one in places if abs(one - self.marked) > step / 2] + [self.marked]
        axes.set_yticks(places, [short(self.rows[one]) for one in places])
        places = spread(self.columns, width / 0.12)
        names = [short(self.columns[one]) for one in places]
        is_upright = sum(len(name) + 1 for name in names) * CHARACTER > width
        axes.set_xticks(places, names, rotation=90 if is_upright else 0)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)


def heatmap(
    values: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    title: str = "",
    row_title: str = "",
    column_title: str = "",
    value_title: str = "",
    unit: str = "",
    center: float | None = 0.0,
    fmt: str = ".2f",
    limits: tuple[float, float] | None = None,
    texts: Sequence[Sequence[str]] | None = None,
    marked: int | None = None,
) -> Chart:
    """Draw a matrix as coloured cells.

    Rows titled "layer" rise: the first is at the bottom. All others start on top.

    Args:
        values: numbers [rows, columns]: nested lists, an array or a tensor. NaN is an empty cell,
            which is hatched.
        rows: labels of the rows: texts, such as tokens, or numbers.
        columns: labels of the columns.
        title: title of the picture.
        row_title: what the rows are, such as "layer".
        column_title: what the columns are, such as "token".
        value_title: what the values are, for the colour bar.
        unit: unit of the values, for the colour bar.
        center: the value with the neutral colour, with blue below and orange above it; None: the
            colours rise from the smallest value.
        fmt: format of the values as text, as for `format`.
        limits: the values at the ends of the colours; None: those of the data.
        texts: texts [rows, columns] to write into the cells, of which 18 characters are drawn.
        marked: index of a row to outline.

    Raises:
        SpecError: sizes that do not fit, no numbers, a format or limits that are wrong, or more
            than 20,000 cells.
    """
    numbers = read_numbers(values, "values", 2)
    row_names, column_names = read_texts(rows, "rows"), read_texts(columns, "columns")
    shape = (len(row_names), len(column_names))
    if numbers.size == 0 and 0 in shape:
        numbers = numbers.reshape(shape)
    if numbers.shape != shape:
        raise SpecError(
            "values",
            f"expected {shape[0]} rows of {shape[1]} values, as `rows` and `columns` have, "
            f"got shape {list(numbers.shape)}",
        )
    if numbers.size > MOST_CELLS:
        raise SpecError(
            "values", f"{numbers.size} cells, and a picture has at most {MOST_CELLS}; draw fewer"
        )
    if texts is not None and [len(line) for line in texts] != [shape[1]] * shape[0]:
        raise SpecError("texts", f"expected {shape[0]} rows of {shape[1]} texts, as `values` has")
    if marked is not None and not 0 <= marked < shape[0]:
        raise SpecError("marked", f"expected an index of `rows`, 0 to {shape[0] - 1}, got {marked}")
    written(0.0, fmt)
    panel = HeatmapPanel(
        visible(title),
        numbers,
        [visible(name) for name in row_names],
        [visible(name) for name in column_names],
        (visible(row_title), visible(column_title)),
        visible(f"{value_title} ({unit})" if value_title and unit else value_title or unit),
        ColorScale.of(numbers, center, limits),
        fmt,
        None if texts is None else [[visible(text) for text in line] for line in texts],
        marked,
        row_title == "layer",
    )
    return Chart(panel.title, (panel,))
