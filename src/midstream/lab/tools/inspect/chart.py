"""Chart of activation norms by layer and by position, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import UnsupportedError
from midstream.lab.tools.inspect.norms import NormSample, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
# Size of the figure in inches, and pixels per inch of a PNG.
SIZE, DPI = (10.0, 4.5), 200
COLORS = ("#2f6db5", "#d1603d", "#3a9a66", "#8a5fb0", "#b08a1f", "#5d6570")
_INK, _MUTED, _GRID = "#22262d", "#5d6570", "#e3e6ea"
_STYLE: Any = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": "#b9bfc7",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    # Text in an SVG stays text, and equal input gives an equal file.
    "svg.fonttype": "none",
    "svg.hashsalt": "midstream",
}


def check_supported(path: Path) -> None:
    """Check that a chart can be written to `path`, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise UnsupportedError(f"{path}: expected a file name that ends in .png or .svg")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnsupportedError('charts need matplotlib: pip install "midstream[inspect]"') from None


def draw(norms: NormSample, path: Path) -> None:
    check_supported(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kind = path.suffix.lower()[1:]
    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.065, right=0.975, top=0.76, bottom=0.115, wspace=0.16)
        figure.text(0.02, 0.935, _title(norms), fontsize=12.5, fontweight="bold")
        caption = "Line: median. Bands: 25th to 75th and 5th to 95th percentile of the rows."
        figure.text(0.02, 0.885, caption, fontsize=8.5, color=_MUTED)
        panels = figure.subplots(1, 2 if norms.by_position else 1, squeeze=False)[0]
        _draw_panel(panels[0], norms.by_layer, "by layer", "layer")
        if norms.by_position:
            _draw_panel(panels[1], norms.by_position, f"by position, {norms.site}", "position")
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(path, format=kind, dpi=DPI, metadata=metadata)


def _title(norms: NormSample) -> str:
    of = f" of request {norms.request[:60]}" if norms.request else ""
    title = f"Norms of {norms.rows:,} rows{of}, codec {norms.codec}"
    if norms.not_finite:
        title += f" ({norms.not_finite:,} non-finite rows omitted)"
    return title


def _draw_panel(axes: Axes, spreads: Sequence[Spread], title: str, x_label: str) -> None:
    """Draw percentiles of several spreads into one pair of axes with a logarithmic y axis."""
    from matplotlib.ticker import MaxNLocator

    values = np.concatenate([spread.percentiles.ravel() for spread in spreads])
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1.0, 1.0)
    first = min(float(spread.x[0]) for spread in spreads)
    last = max(float(spread.x[-1]) for spread in spreads)
    margin = 0.012 * (last - first) or 1.0
    low, high = _widened(float(low), float(high))
    axes.set_title(title, loc="left", fontsize=10, pad=20)
    axes.set_xlabel(x_label)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    _scale_norms(axes, low, high)
    for number, spread in enumerate(spreads):
        color = COLORS[number % len(COLORS)]
        # The logarithmic axis has no zero: norms of zero are drawn at its lower end.
        percentiles = np.maximum(spread.percentiles, low)
        x = spread.x
        if len(x) == 1:
            # A single point has no line: draw a short horizontal one.
            x = np.array([x[0] - margin / 4, x[0] + margin / 4])
            percentiles = np.repeat(percentiles, 2, axis=0)
        p5, p25, p50, p75, p95 = percentiles.T
        axes.fill_between(x, p5, p95, color=color, alpha=0.13, linewidth=0)
        axes.fill_between(x, p25, p75, color=color, alpha=0.25, linewidth=0)
        axes.plot(x, p50, color=color, linewidth=1.7, label=spread.name)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.008, 1), borderaxespad=0.1, borderpad=0.2, ncols=6,
        handlelength=0.9, columnspacing=1.0, handletextpad=0.4, fontsize=8,
    )  # fmt: skip


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return the bounds of a logarithmic axis with a margin around its values."""
    margin = 10 ** (0.01 + 0.03 * math.log10(high / low))
    return low / margin, high * margin


def _scale_norms(axes: Axes, low: float, high: float) -> None:
    """Set a logarithmic y axis from `low` to `high` with a few labelled ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(low, high)
    decades = math.log10(high / low)
    if decades >= 0.7:
        subs = (1.0,) if decades >= 4 else (1.0, 3.0) if decades >= 2 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _label(value)))


def _label(value: float) -> str:
    return f"{value:,.6g}" if value < 1e7 else f"{value:.6g}"
