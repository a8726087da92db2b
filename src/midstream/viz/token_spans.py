"""One text with its tokens coloured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.viz.color_scale import ColorScale, Floats, read_numbers, written
from midstream.viz.heatmaps import MOST_TEXTS
from midstream.viz.markup import escape, tag, visible
from midstream.viz.picture import Picture, details, figure


def tokens(
    texts: Sequence[str],
    values: Any,
    *,
    title: str = "",
    center: float | None = 0.0,
    unit: str = "",
    fmt: str = ".2f",
    limits: tuple[float, float] | None = None,
    positions: Sequence[int] | None = None,
) -> Picture:
    """Draw one text whose tokens are coloured by a value each.

    Args:
        texts: the tokens as text, in order, spaces included.
        values: one number for each: a list, an array or a tensor. NaN is a token without colour.
        title: title of the picture.
        center: the value with the neutral colour; None: the colours rise from the smallest value.
        unit: unit of the values, written after them.
        fmt: format of the values, as for `format`.
        limits: the values at the ends of the colours; None: those of the data.
        positions: positions of the tokens; None: 0, 1, ….

    Raises:
        SpecError: sizes that do not fit, texts that are none, or no numbers.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise SpecError("texts", "expected a list of `str`, one for each token")
    numbers = read_numbers(values, "values", 1)
    places = [int(place) for place in (range(len(texts)) if positions is None else positions)]
    for name, count in (("values", len(numbers)), ("positions", len(places))):
        if count != len(texts):
            raise SpecError(name, f"expected {len(texts)}, as `texts` has, got {count}")
    if len(texts) > MOST_TEXTS:
        raise SpecError("texts", f"{len(texts)} tokens, and a picture has at most {MOST_TEXTS}")
    scale = ColorScale.of(numbers, center, limits)
    suffix = f" {unit}" if unit else ""
    spans, lines = [], []
    for place, text, value in zip(places, texts, numbers.tolist(), strict=True):
        number = written(value, fmt) + suffix if value == value else "no value"
        label = f"{visible(text)!r} at {place}: {number}"
        # Line breaks stay line breaks, after a sign that takes the colour.
        pieces = (visible(part) if part.strip(" ") else part for part in text.split("\n"))
        style = f"c {scale.style(value)}".strip()
        spans.append(tag("span", escape("⏎\n".join(pieces)), style, title=label))
        lines.append(f"{place:>5}  {number:>10}  {visible(text)!r}")
    box = tag("div", "".join(spans), "text", dir="auto") + legend(scale, numbers, fmt, unit)
    table = "\n".join(lines)
    return Picture(
        title, (f"{title}\n" if title else "") + table, figure(title, box + details(table))
    )


def legend(scale: ColorScale, values: Floats, fmt: str, unit: str = "") -> str:
    least, bins = scale.legend(values)
    steps = "".join(tag("i", cls=f"b{bin_index}") for bin_index in bins)
    suffix = f" {unit}" if unit else ""
    low = tag("span", escape(written(least, fmt)))
    high = tag("span", escape(written(scale.high, fmt) + suffix))
    return tag("div", low + tag("span", steps, "ramp", aria_hidden="true") + high, "legend")
