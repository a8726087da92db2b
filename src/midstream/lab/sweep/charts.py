"""Pictures of grids: heatmaps in HTML, and with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MissingExtraError
from midstream.viz.heatmaps import MOST_CELLS, heatmap
from midstream.viz.picture import Picture

# Panels that are shown; a sweep of many heads at many positions has more.
MOST_PANELS = 12


@dataclass(frozen=True)
class Panel:
    """One heatmap; `title` says what all of its values have in common."""

    title: str
    row: str
    column: str
    rows: list[str]
    columns: list[str]
    values: NDArray[np.float32]  # float32 [rows, columns]; nan: an empty cell


def picture_of(panels: Sequence[Panel], title: str, center: float, most: float) -> Picture:
    """Return the first `MOST_PANELS` panels as one picture, with the same colours."""
    limits = (center - most, center + most)
    pictures = [
        heatmap(
            panel.values,
            panel.rows,
            panel.columns,
            title=f"{title}, {panel.title}" if panel.title else title,
            row_title=panel.row,
            column_title=panel.column,
            center=center,
            limits=limits,
        )
        for panel in panels[:MOST_PANELS]
        if panel.values.size <= MOST_CELLS
    ]
    left = len(panels) - len(pictures)
    if left:
        rest = f"{left} of {len(panels)} heatmaps are not shown; see Sweep.values"
        pictures.append(Picture("", f"<p>{rest}</p>", rest))
    body = "".join(picture.body for picture in pictures)
    return Picture(title, body, "\n\n".join(picture.text for picture in pictures))


def plot(panels: Sequence[Panel], title: str, center: float, most: float, **options: Any) -> Any:
    """Draw panels side by side with `center` in the middle of the colours; return the figure."""
    MissingExtraError.require("matplotlib", "Sweep.plot")
    from matplotlib import pyplot

    shown = panels[:MOST_PANELS]
    width = max(4.0, 0.45 * len(shown[0].columns) + 2.5) * len(shown)
    height = max(3.0, 0.22 * len(shown[0].rows) + 2.0)
    figure_options = {
        "figsize": (width, height),
        "squeeze": False,
        "layout": "constrained",
        **options,
    }
    figure, axes = pyplot.subplots(1, len(shown), **figure_options)
    for axis, panel in zip(axes.flat, shown, strict=True):
        image = axis.imshow(
            panel.values,
            cmap="RdBu",
            vmin=center - most,
            vmax=center + most,
            aspect="auto",
            origin="lower",
        )
        axis.set_title(panel.title)
        axis.set_ylabel(panel.row)
        axis.set_xlabel(panel.column)
        axis.set_xticks(range(len(panel.columns)), panel.columns, rotation=60, ha="right")
        axis.set_yticks(range(len(panel.rows)), panel.rows)
    figure.colorbar(image, ax=list(axes.flat), label=title)
    return figure
