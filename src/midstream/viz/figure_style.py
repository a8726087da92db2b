"""How figures look: one style for notebooks, papers and pages, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from midstream.errors import MissingExtraError
from midstream.viz.theme import LIGHT

COLUMN, PAGE = 3.4, 7.0
"""Width in inches of a column and of a page of a paper."""

CHARACTER = 0.058
"""Width in inches of a character of a tick label, on average."""

_LONGEST = 18  # characters of a label, and of a text in a cell
# Fonts with the characters that DejaVu Sans lacks, where they are installed.
_FALLBACKS = ("Noto Sans CJK SC", "WenQuanYi Zen Hei", "Noto Sans Arabic", "Noto Sans Devanagari")


def styled(seed: str = "midstream") -> AbstractContextManager[None]:
    """Return the context in which figures are drawn; `seed` makes ids in an SVG its own."""
    MissingExtraError.require("matplotlib", "a chart")
    from matplotlib import font_manager, rc_context, rc_params_from_file

    style = rc_params_from_file(
        Path(__file__).parent / "paper.mplstyle", use_default_template=False
    )
    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FALLBACKS if name in installed)]
    return rc_context({**style, "font.sans-serif": fonts, "svg.hashsalt": seed})


def color_map(has_center: bool) -> Any:
    """Return the colours of a scale: blue, neutral, orange; without a centre neutral to orange."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = [tuple(part / 255 for part in color) for color in LIGHT[not has_center :]]
    return LinearSegmentedColormap.from_list("midstream", colors).with_extremes(bad=(0, 0, 0, 0))


def label(axes: Any, along: str, labels: Sequence[str], marked: int | None = None) -> None:
    """Label places 0, 1, … of the axis `x` or `y`: as many as there is space for."""
    axis, area = getattr(axes, f"{along}axis"), axes.get_window_extent()
    inches = (area.width if along == "x" else area.height) / axes.figure.dpi
    room = max(int(inches / 0.12), 1)
    steps = (scale * factor for scale in (1, 10, 100, 1000, 10_000) for factor in (1, 2, 5))
    step = next(size for size in steps if len(labels) <= size * room)
    places = list(range(0, len(labels), step))
    if step > 1 and all(text.isdecimal() for text in labels):
        # Numbers at the multiples of a round one, if these are there.
        rounded = [place for place, text in enumerate(labels) if int(text) % step == 0]
        places = rounded if 0 < len(rounded) <= room else places
    if marked is not None:
        places = [n for n in places if abs(n - marked) >= step / 2 and n != marked] + [marked]
    names = [short(labels[place]) for place in places]
    is_upright = along == "x" and sum(len(name) + 1 for name in names) * CHARACTER > inches
    axis.set_ticks(places, names, rotation=90 if is_upright else 0)
    for text in axis.get_ticklabels():
        text.set_parse_math(False)


def short(text: str) -> str:
    """Return a label as it is drawn."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def inches_of(labels: Sequence[str]) -> float:
    """Return the width of the longest label."""
    return CHARACTER * max((len(short(text)) for text in labels), default=0)
