"""What a chart has drawn, read back from matplotlib's axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure


@dataclass
class Drawn:
    """One panel: its words, and its values as they lie on the page."""

    title: str
    titles: tuple[str, str]  # of x and of y
    x: list[str]  # labels
    y: list[str]  # labels, the lowest first
    bar: str  # title of the colour bar
    image: np.ndarray | None  # [rows, columns], the lowest row first; NaN: an empty cell
    limits: tuple[float, float] | None
    lines: dict[str, np.ndarray]  # y data by label
    texts: list[str]


def drawn(result: Any, **given: Any) -> Drawn:
    """Draw a result of one panel on axes, and read them."""
    axes = Figure().subplots()
    assert result.plot(axes, **given) is axes
    return read(axes)


def read(axes: Any) -> Drawn:
    """Read one panel."""
    image = axes.images[0] if axes.images else None
    values = None
    if image is not None:
        values = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        values = values if image.origin == "lower" else values[::-1]
    y = [label.get_text() for label in axes.get_yticklabels()]
    bar = getattr(image, "colorbar", None)
    return Drawn(
        joined(axes.get_title(loc="left") or axes.get_title()),
        (axes.get_xlabel(), axes.get_ylabel()),
        [label.get_text() for label in axes.get_xticklabels()],
        y if image is None or image.origin == "lower" else y[::-1],
        joined(bar.ax.get_ylabel()) if bar is not None else "",
        values,
        image.get_clim() if image is not None else None,
        {line.get_label(): line.get_ydata() for line in axes.lines},
        [text.get_text() for text in axes.texts],
    )


def joined(text: str) -> str:
    """A title in one line."""
    return text.replace("\n", " ")


def same(found: Any, wanted: Any) -> None:
    """Compare numbers, of which NaN equals NaN."""
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), rtol=1e-6)
