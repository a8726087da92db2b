"""A value for each row and column, as colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.viz.chart import Chart, ColorBar, Panel
from midstream.viz.color_scale import MOST, ColorScale, Floats, read_numbers, read_texts, written
from midstream.viz.figure_style import color_map, inches_of, label, short
from midstream.viz.markup import visible
from midstream.viz.theme import COLORS, ink_on

MOST_CELLS, MOST_TEXTS = 1_000_000, 20_000


def position_label(position: int, tokens: Any = None) -> str:
    """Return the label of a position; with `tokens`, the texts of a request, also its token."""
    return str(position) if tokens is None else f"{position} {tokens[position]}"


@dataclass(frozen=True)
class _Grid:
    """What a heatmap draws."""

    values: Floats  # [rows, columns]
    names: tuple[list[str], list[str]]  # of the rows and columns
    titles: tuple[str, str]  # likewise
    bar: str  # title of the colour bar
    scale: ColorScale
    texts: list[list[str]] | None  # in the cells
    marked: int | None  # a row
    origin: Any  # "lower": the first row is at the bottom; "upper"

    @property
    def size(self) -> tuple[float, float]:
        (rows, columns), texts = self.names, [text for line in self.texts or () for text in line]
        cell = (inches_of(texts) + 0.08, 0.17) if self.texts else (0.15, 0.13)
        most = (60.0, 60.0) if self.texts else (5.4, 5.5)
        across = min(max(cell[0] * len(columns), 1.7), most[0])
        along = min(max(cell[1] * len(rows), 0.9), most[1])
        is_upright = inches_of(columns) > across / max(len(columns), 1)
        below = inches_of(columns) if is_upright else 0.15
        return across + inches_of(rows) + 1.15, along + below + 0.65

    def draw(self, axes: Any) -> tuple[Any, ColorBar] | None:
        axes.set_ylabel(self.titles[0], parse_math=False)
        axes.set_xlabel(self.titles[1], parse_math=False)
        if not self.values.size:
            return None
        low, high = self.scale.ends
        # matplotlib leaves infinite values out.
        shown = np.nan_to_num(self.values, nan=np.nan, posinf=high, neginf=low).clip(-MOST, MOST)
        colors = {"cmap": color_map(self.scale.center is not None), "vmin": low, "vmax": high}
        image = axes.imshow(
            shown, aspect="auto", interpolation="nearest", origin=self.origin, **colors
        )
        if np.isnan(shown).any():  # empty cells are hatched
            axes.patch.set(hatch="//////", edgecolor="#d3cec6", linewidth=0, facecolor="none")
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0)
        label(axes, "y", self.names[0], self.marked)
        label(axes, "x", self.names[1])
        if self.marked is not None:
            from matplotlib.patches import Rectangle

            line: dict[str, Any] = {"edgecolor": "black", "linewidth": 1}
            place = (-0.5, self.marked - 0.5)
            axes.add_patch(
                Rectangle(place, len(self.names[1]), 1, fill=False, clip_on=False, **line)
            )
        for (row, column), text in np.ndenumerate(np.array(self.texts or [[]], dtype=object)):
            *color, alpha = map(int, image.cmap(image.norm(shown[row, column]), bytes=True))
            ink = ink_on((color[0], color[1], color[2])) if alpha else COLORS["soft"][0]
            told = axes.text(column, row, short(text), color=ink, ha="center", va="center")
            told.set(fontsize="x-small", clip_on=True, parse_math=False, in_layout=False)
        return image, ColorBar(self.bar, low, high, self.scale.center)


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
            than 1,000,000 cells, or 20,000 with texts.
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
    most = MOST_CELLS if texts is None else MOST_TEXTS
    if numbers.size > most:
        told = "a picture" if texts is None else "a picture with texts"
        raise SpecError("values", f"{numbers.size} cells, and {told} has at most {most}")
    if texts is not None and [len(line) for line in texts] != [shape[1]] * shape[0]:
        raise SpecError("texts", f"expected {shape[0]} rows of {shape[1]} texts, as `values` has")
    if marked is not None and not 0 <= marked < shape[0]:
        raise SpecError("marked", f"expected an index of `rows`, 0 to {shape[0] - 1}, got {marked}")
    seen = None if texts is None else [[visible(text) for text in line] for line in texts]
    grid = _Grid(
        numbers,
        ([visible(name) for name in row_names], [visible(name) for name in column_names]),
        (visible(row_title), visible(column_title)),
        visible(f"{value_title} ({unit})" if value_title and unit else value_title or unit),
        ColorScale.of(numbers, center, limits),
        seen,
        marked,
        "lower" if row_title == "layer" else "upper",
    )
    lines = [[f"{grid.titles[0]}↓ {grid.titles[1]}→".strip(" ↓→"), *grid.names[1]]]
    for row in range(shape[0])[:: -1 if grid.origin == "lower" else 1]:
        cells = [written(value, fmt) for value in numbers[row]] if seen is None else seen[row]
        lines.append([grid.names[0][row], *cells])
    panel = Panel(visible(title), grid.size, lines, grid.draw)
    return Chart(panel.title, (panel,))
