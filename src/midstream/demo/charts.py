"""Charts of the report as inline SVG; the style sheet has their colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.demo.html import escape, tag
from midstream.demo.result import TokenMap, format_scale, format_signed

NUM_BINS = 21
"""Colours of the diverging scale: bin 0 is the negative end, 20 the positive end, 10 neutral."""


def color_bin(value: float, limit: float) -> int:
    """Return the bin of `value` on a scale from −limit to limit; values beyond it are clipped."""
    place = (max(-1.0, min(1.0, value / limit)) + 1) / 2 if limit > 0 else 0.5
    return round(place * (NUM_BINS - 1))


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: its values by layer, its name, and its class in the style sheet."""

    name: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True)
class Frame:
    """The plotting area of one chart, and its mapping from values to coordinates."""

    num_columns: int
    low: float
    high: float
    width: float = 480
    height: float = 240
    left: float = 40
    right: float = 14
    top: float = 24
    bottom: float = 40

    @property
    def middle(self) -> float:
        return (self.left + self.width - self.right) / 2

    def x(self, column: float) -> float:
        span = self.width - self.left - self.right
        return self.left + span * column / max(1, self.num_columns - 1)

    def y(self, value: float) -> float:
        span = self.height - self.top - self.bottom
        return self.height - self.bottom - span * (value - self.low) / (self.high - self.low)


def layer_chart(
    title: str, lines: Sequence[ChartLine], frame: Frame, marked: int, guess: float
) -> str:
    """Draw values by layer, with a vertical line at `marked` and a dashed one at `guess`."""
    parts = [_grid(frame), _layer_axis(frame)]
    parts.append(_rule(frame, frame.x(marked), "marked"))
    label = _text(frame.x(marked), frame.top - 6, f"layer {marked}", "marked-label middle")
    parts.append(label)
    level = f"{frame.y(guess):.1f}"
    parts.append(
        tag("line", x1=frame.left, x2=frame.width - frame.right, y1=level, y2=level, cls="guess")
    )
    parts += [_line(frame, line) for line in lines]
    return _svg(frame.width, frame.height, title, "".join(parts), "chart")


def strength_chart(
    title: str, scales: Sequence[float], rows: Sequence[Sequence[float | None]]
) -> str:
    """Draw readings by strength: a faint line per question, and their mean."""
    known = [value for row in rows for value in row if value is not None]
    low, high = min([*known, 0.0]), max([*known, 0.0])
    margin = 0.08 * (high - low or 1.0)
    frame = Frame(len(scales), low - margin, high + margin)
    parts = [_grid(frame)]
    for column, scale in enumerate(scales):
        label = format_scale(scale)
        parts.append(_text(frame.x(column), frame.height - 22, label, "tick middle"))
    parts.append(_text(frame.middle, frame.height - 5, "strength", "axis middle"))
    for row in rows:
        parts.append(_polyline(frame, row, "question"))
    means = [_mean([row[column] for row in rows]) for column in range(len(scales))]
    parts.append(_polyline(frame, means, "line-a"))
    for column, value in enumerate(means):
        if value is not None:
            tip = f"{format_scale(scales[column])}: mean reading {format_signed(value)}"
            parts.append(_dot(frame, column, value, "dot-a", tip))
    return _svg(frame.width, frame.height, title, "".join(parts), "chart")


CELL_WIDTH, CELL_HEIGHT = 26, 11
MAP_LEFT, MAP_TOP = 34, 74


def heatmap(token_map: TokenMap, limit: float, marked: int, weights: Sequence[float]) -> str:
    """Draw one cell per layer and token: its cosine as colour, the last layer on top.

    Args:
        token_map: the text and its cosines.
        limit: the cosine at the ends of the colour scale.
        marked: the layer to outline.
        weights: opacity of each layer, 0 to 1: how well its direction separates the classes.
    """
    num_layers, num_tokens = len(token_map.cosine), len(token_map.tokens)
    parts = [
        _token_label(MAP_LEFT + CELL_WIDTH * (column + 0.5), MAP_TOP - 6, token)
        for column, token in enumerate(token_map.tokens)
    ]
    for layer in range(num_layers):
        y = MAP_TOP + CELL_HEIGHT * (num_layers - 1 - layer)
        if layer % 5 == 0 or layer == num_layers - 1:
            parts.append(_text(MAP_LEFT - 6, y + CELL_HEIGHT - 2, str(layer), "tick end"))
        cells = "".join(_cell(token_map, layer, column, y, limit) for column in range(num_tokens))
        parts.append(tag("g", cells, opacity=f"{0.1 + 0.9 * weights[layer]:.2f}"))
    outline = {"x": MAP_LEFT, "y": MAP_TOP + CELL_HEIGHT * (num_layers - 1 - marked)}
    size = {"width": CELL_WIDTH * num_tokens, "height": CELL_HEIGHT}
    parts.append(tag("rect", cls="marked-row", **outline, **size))
    width = MAP_LEFT + CELL_WIDTH * num_tokens + 46  # space for the last token's slanted label
    height = MAP_TOP + CELL_HEIGHT * num_layers + 6
    return _svg(width, height, token_map.title, "".join(parts), "heatmap", fixed=True)


def _cell(token_map: TokenMap, layer: int, column: int, y: float, limit: float) -> str:
    cosine, between = token_map.cosine[layer][column], token_map.projection[layer][column]
    tip = f"{token_map.tokens[column]!r}, layer {layer}: cosine {format_signed(cosine)}"
    tip += f", projection {format_signed(between)}"
    place = {"x": MAP_LEFT + CELL_WIDTH * column, "y": y}
    size = {"width": CELL_WIDTH, "height": CELL_HEIGHT}
    style = f"b{color_bin(cosine, limit)}"
    return tag("rect", tag("title", escape(tip)), cls=style, **place, **size)


def color_limit(token_maps: Sequence[TokenMap]) -> float:
    """Return the limit of the colour scale of all maps: 98 % of the cells are below it."""
    sizes = sorted(abs(v) for m in token_maps for row in m.cosine for v in row)
    return sizes[int(0.98 * (len(sizes) - 1))] if sizes else 1.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _svg(width: float, height: float, title: str, body: str, cls: str, fixed: bool = False) -> str:
    size = {"width": f"{width:g}", "height": f"{height:g}"} if fixed else {}
    view = f"0 0 {width:g} {height:g}"
    head = tag("title", escape(title))
    return tag("svg", head + body, viewBox=view, role="img", cls=cls, **size)


def _text(x: float, y: float, words: str, cls: str) -> str:
    return tag("text", escape(words), x=f"{x:.1f}", y=f"{y:.1f}", cls=cls)


def _token_label(x: float, y: float, token: str) -> str:
    shown = token.replace("\n", "⏎").strip(" ") or "␣"
    shown = shown if len(shown) <= 11 else shown[:10] + "…"
    turn = f"rotate(-52 {x:g} {y:g})"
    return tag("text", escape(shown), x=f"{x:g}", y=f"{y:g}", transform=turn, cls="token")


def _rule(frame: Frame, x: float, cls: str) -> str:
    return tag(
        "line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=frame.top, y2=frame.height - frame.bottom, cls=cls
    )


def _grid(frame: Frame) -> str:
    """Draw horizontal lines at round values, with their labels."""
    step = _round_step(frame.high - frame.low)
    parts, index = [], math.ceil(frame.low / step)
    while index * step <= frame.high + 1e-9:
        y = frame.y(index * step)
        at = f"{y:.1f}"
        parts.append(
            tag("line", x1=frame.left, x2=frame.width - frame.right, y1=at, y2=at, cls="grid")
        )
        label = f"{index * step:g}".replace("-", "−")
        parts.append(_text(frame.left - 6, y + 4, label, "tick end"))
        index += 1
    return "".join(parts)


def _round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten that divides `span` into four to ten steps."""
    power = 10.0**-9
    while span / (power * 10) > 1:
        power *= 10
    return next(power * k for k in (0.1, 0.2, 0.5, 1, 2, 5, 10) if span / (power * k) <= 7)


def _layer_axis(frame: Frame) -> str:
    parts = [
        _text(frame.x(layer), frame.height - 22, str(layer), "tick middle")
        for layer in range(0, frame.num_columns, 5 if frame.num_columns > 12 else 1)
    ]
    return "".join(parts) + _text(frame.middle, frame.height - 5, "layer", "axis middle")


def _line(frame: Frame, line: ChartLine) -> str:
    dots = [
        _dot(frame, layer, value, f"dot-{line.style}", f"{line.name}, layer {layer}: {value:.3f}")
        for layer, value in enumerate(line.values)
    ]
    return _polyline(frame, line.values, f"line-{line.style}") + "".join(dots)


def _polyline(frame: Frame, values: Sequence[float | None], cls: str) -> str:
    points = " ".join(
        f"{frame.x(column):.1f},{frame.y(value):.1f}"
        for column, value in enumerate(values)
        if value is not None
    )
    return tag("polyline", points=points, cls=cls)


def _dot(frame: Frame, column: int, value: float, cls: str, tip: str) -> str:
    place = {"cx": f"{frame.x(column):.1f}", "cy": f"{frame.y(value):.1f}", "r": "3"}
    return tag("circle", tag("title", escape(tip)), cls=cls, **place)
