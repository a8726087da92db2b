"""How figures look: one style for notebooks, papers and pages, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from midstream.errors import MissingExtraError
from midstream.viz.theme import COLORS, LIGHT

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

COLUMN, PAGE = 3.4, 7.0
"""Width in inches of a column and of a page of a paper."""

CHARACTER = 0.058
"""Width in inches of a character of a tick label, on average."""

_LONGEST = 18  # characters of a label, and of a text in a cell

INK, SOFT, LINE = (COLORS[name][0] for name in ("ink", "soft", "line"))

# Fonts with the characters that DejaVu Sans lacks, where they are installed.
_FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Sans Arabic",
    "Noto Sans Devanagari", "Hiragino Sans", "Microsoft YaHei",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 3,
    "errorbar.capsize": 1.5,
    "hatch.linewidth": 0.6,
    # Tokens are text, whatever signs they have.
    "text.parse_math": False,
    "text.usetex": False,
    # Text in files stays text.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
}


def styled(seed: str = "midstream") -> AbstractContextManager[None]:
    """Return the context in which figures are drawn; `seed` makes ids in an SVG its own."""
    MissingExtraError.require("matplotlib", "a chart")
    from matplotlib import font_manager, rc_context

    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FALLBACKS if name in installed)]
    style: Any = {**_STYLE, "font.sans-serif": fonts, "svg.hashsalt": seed}
    context: AbstractContextManager[None] = rc_context(style)
    return context


def color_map(has_center: bool) -> Colormap:
    """Return the colours of a scale: blue, neutral, orange; without a centre neutral to orange."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = LIGHT if has_center else LIGHT[1:]
    colors = [tuple(part / 255 for part in color) for color in ends]
    return LinearSegmentedColormap.from_list("midstream", colors).with_extremes(bad=(0, 0, 0, 0))


def spread(labels: Sequence[str], room: float) -> list[int]:
    """Return the places of labels to show: all, or numbers at multiples of a round one."""
    steps = (scale * one for scale in (1, 10, 100, 1000, 10_000) for one in (1, 2, 5))
    step = next((one for one in steps if len(labels) <= one * max(room, 1)), len(labels))
    if step > 1 and all(label.isdecimal() for label in labels):
        found = [place for place, label in enumerate(labels) if int(label) % step == 0]
        if found and len(found) <= max(room, 1):
            return found
    return list(range(0, len(labels), step))


def short(label: str) -> str:
    """Return a label as it is drawn."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
