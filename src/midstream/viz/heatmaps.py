"""A value for each row and column, as colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.viz.color_scale import ColorScale, read_numbers, read_texts, written
from midstream.viz.markup import escape, tag, visible
from midstream.viz.picture import Picture, cell, columns_of, figure, readout

MOST_CELLS = 20_000
# Larger pictures have cells without visible numbers.
_MOST_NUMBERS = 150
_LONG_LABEL = 4


def heatmap(
    values: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    title: str = "",
    row_title: str = "",
    column_title: str = "",
    unit: str = "",
    center: float | None = 0.0,
    fmt: str = ".2f",
    limits: tuple[float, float] | None = None,
    texts: Sequence[Sequence[str]] | None = None,
    details: Sequence[Sequence[str]] | None = None,
    marked: int | None = None,
) -> Picture:
    """Draw a matrix as coloured cells; each tells its value to mouse, touch and keyboard.

    Args:
        values: numbers [rows, columns]: nested lists, an array or a tensor. NaN is an empty cell.
        rows: labels of the rows, the first on top: texts, such as tokens, or numbers.
        columns: labels of the columns.
        title: title of the picture.
        row_title: what the rows are, such as "layer".
        column_title: what the columns are, such as "token".
        unit: unit of the values, written after them.
        center: the value with the neutral colour, with blue below and orange above it; None: the
            colours rise from the smallest value.
        fmt: format of the values, as for `format`.
        limits: the values at the ends of the colours; None: those of the data.
        texts: texts [rows, columns] to write into the cells instead of the values.
        details: texts [rows, columns] that a cell tells after its value.
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
    for name, table in (("texts", texts), ("details", details)):
        if table is not None and [len(line) for line in table] != [shape[1]] * shape[0]:
            raise SpecError(name, f"expected {shape[0]} rows of {shape[1]} texts, as `values` has")
    if marked is not None and not 0 <= marked < shape[0]:
        raise SpecError("marked", f"expected an index of `rows`, 0 to {shape[0] - 1}, got {marked}")
    scale = ColorScale.of(numbers, center, limits)
    suffix = f" {unit}" if unit else ""
    shown = [[written(value, fmt) for value in line] for line in numbers]
    names = ([visible(name) for name in row_names], [visible(name) for name in column_names])
    lines = []
    for r, line in enumerate(shown):
        cells = []
        for c, number in enumerate(line):
            value = float(numbers[r, c])
            parts = [] if texts is None else [texts[r][c]]
            parts += [number + suffix] if value == value else [] if parts else ["no value"]
            parts += [] if details is None else [details[r][c]]
            row, column = f"{row_title} {names[0][r]}", f"{column_title} {names[1][c]}"
            told = ", ".join(part for part in parts if part)
            label = f"{row.strip()}, {column.strip()}: {told}"
            text = number if texts is None else texts[r][c]
            cells.append(cell("td", "gridcell", text, label, scale.style(value), r == c == 0))
        lines.append(cells)
    body = _table(lines, names, (row_title, column_title), title, texts is None, marked)
    foot = readout("a cell", legend(scale, fmt, unit))
    plain = [[f"{row_title}↓ {column_title}→".strip(" ↓→"), *names[1]]]
    visible_texts = shown if texts is None else texts
    plain += [[name, *line] for name, line in zip(names[0], visible_texts, strict=True)]
    head = f"{title}\n" if title else ""
    return Picture(title, figure(title, body + foot), head + columns_of(plain))


def legend(scale: ColorScale, fmt: str, unit: str = "") -> str:
    steps = "".join(tag("i", cls=f"b{step}") for step in scale.steps)
    suffix = f" {unit}" if unit else ""
    low = tag("span", escape(written(scale.low, fmt)))
    high = tag("span", escape(written(scale.high, fmt) + suffix))
    return tag("div", low + tag("span", steps, "ramp", aria_hidden="true") + high, "legend")


def _table(
    lines: list[list[str]],
    names: tuple[list[str], list[str]],
    titles: tuple[str, str],
    title: str,
    has_numbers: bool,
    marked: int | None,
) -> str:
    rows, columns = names
    is_dense = has_numbers and len(rows) * len(columns) > _MOST_NUMBERS
    style = "heat dense" if is_dense else "heat"
    style += " many" if is_dense and len(columns) > 48 else ""
    parts = []
    if any(titles):
        corner = tag("th", escape(f"{titles[0]} ↓" if titles[0] else ""), "side axis")
        top = tag("th", escape(f"{titles[1]} →" if titles[1] else ""), "axis", colspan=len(columns))
        parts.append(tag("tr", corner + (top if columns else ""), role="row"))
    parts.append(tag("tr", tag("th", "", "side") + _headings(columns, is_dense), role="row"))
    every = 5 if is_dense and len(rows) > 16 and all(name.isdecimal() for name in rows) else 1
    for row, (name, cells) in enumerate(zip(rows, lines, strict=True)):
        # Beside the marked row's label there is no space for another.
        is_beside = every > 1 and marked is not None and abs(row - marked) == 1
        is_shown = row == marked or not (is_beside or (every > 1 and int(name) % every))
        label = escape(name) if is_shown else tag("span", escape(name), "rare")
        side = tag("th", label, "side", scope="row", title=name)
        row_style = "marked" if row == marked else ""
        parts.append(tag("tr", side + "".join(cells), row_style, role="row"))
    table = tag(
        "table",
        "".join(parts),
        style,
        role="grid",
        aria_label=title or "heatmap",
        data_columns=len(columns),
        data_lm_suppress_shortcuts="true",
    )
    return tag("div", table, "scroll")


def _headings(columns: list[str], is_dense: bool) -> str:
    is_upright = is_dense and any(len(name) > _LONG_LABEL for name in columns)
    every = 5 if is_dense and len(columns) > 16 and all(name.isdecimal() for name in columns) else 1
    parts = []
    for name in columns:
        short = name if len(name) <= 16 else name[:15] + "…"
        if is_upright:
            content = tag("span", escape(short), "up")
        elif every > 1 and int(name) % every:
            content = tag("span", escape(name), "rare")
        else:
            content = escape(short)
        parts.append(tag("th", content, "top", scope="col", title=name))
    return "".join(parts)
