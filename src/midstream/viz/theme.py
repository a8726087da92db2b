"""Style sheet of pictures: no fonts, no images, nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from midstream.viz.color_scale import NUM_BINS

Rgb = tuple[int, int, int]

LIGHT: tuple[Rgb, Rgb, Rgb] = ((33, 90, 168), (244, 242, 238), (201, 84, 12))
"""Colours of the low end, the centre and the high end, on a light page."""

DARK: tuple[Rgb, Rgb, Rgb] = ((98, 164, 255), (38, 40, 44), (255, 146, 64))

# Names of colours: (on a light page, on a dark one).
COLORS = {
    "page": ("#fbfaf8", "#161719"),
    "card": ("#ffffff", "#1e2023"),
    "ink": ("#1d1c1a", "#ece9e4"),
    "soft": ("#5f5b55", "#a39f98"),
    "line": ("#e3dfd8", "#34373c"),
}
# Lines of a curve, in order: light, dark, dashes, marker. In print without colours the markers and
# dashes tell them apart. None has the colour of a scale's end, which stays the same on a dark page.
LINES = (
    ("#c8540c", "#ff9240", (), "o"),
    ("#205aa8", "#62a4ff", (5, 2), "s"),
    ("#3a7d44", "#7ccb87", (1.5, 2), "^"),
    ("#7d4fa8", "#c39bea", (6, 2, 1.5, 2), "D"),
    ("#8a6d12", "#d8b64c", (3, 1.5), "v"),
    ("#5d6570", "#9aa4b2", (1, 1.5), "X"),
)
VARIABLES = {
    **{light: f"var(--{name})" for name, (light, _) in COLORS.items() if name != "card"},
    **{light: f"var(--line{index})" for index, (light, *_) in enumerate(LINES)},
}
"""Colours of a chart, by which a page's light and dark ones replace them."""

PAGE_CSS = """
body.midstream { margin: 0; background: var(--page); font: 17px/1.55 var(--serif); }
body.midstream main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
"""


def style_sheet() -> str:
    """Return the rules of pictures, with the colours of light and dark pages."""
    pairs = {**COLORS, **{f"line{index}": line[:2] for index, line in enumerate(LINES)}}
    names = " ".join(f"--{name}: light-dark({a}, {b});" for name, (a, b) in pairs.items())
    fonts = (
        '--sans: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;'
        ' --serif: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif;'
    )
    css = (Path(__file__).parent / "pictures.css").read_text(encoding="utf-8")
    return f"{css.replace('@VARIABLES@', f'{names} {fonts}')}{_bins()}\n"


def bin_colors(index: int) -> tuple[Rgb, Rgb]:
    """Return the colours of one bin, on a light page and on a dark one."""
    half = NUM_BINS // 2
    colors = []
    for low, middle, high in (LIGHT, DARK):
        end, share = (low, half - index) if index < half else (high, index - half)
        red, green, blue = (
            round(m + (e - m) * share / half) for m, e in zip(middle, end, strict=True)
        )
        colors.append((red, green, blue))
    return colors[0], colors[1]


def luminance(color: Rgb) -> float:
    """Return the relative luminance of WCAG 2, 0 to 1."""
    parts = [part / 255 for part in color]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(color: Rgb) -> str:
    """Return black or white: the one with more contrast to `color`, which is at least 4.5."""
    return "#000" if luminance(color) > 0.179 else "#fff"


def _bins() -> str:
    """Return the rules of the bins: `--c` is the colour, `--i` that of text on it."""
    rules = []
    for index in range(NUM_BINS):
        light, dark = bin_colors(index)
        rules.append(
            f".midstream .b{index} {{ --c: light-dark({_hex(light)}, {_hex(dark)});"
            f" --i: light-dark({ink_on(light)}, {ink_on(dark)}); }}"
        )
    return "\n".join(rules)


def _hex(color: Rgb) -> str:
    return "#" + "".join(f"{part:02x}" for part in color)


def source_of(text: str) -> str:
    """Return the source that allows an inline style sheet, for a security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
