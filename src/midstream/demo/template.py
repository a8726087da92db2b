"""The report's style sheet and frame. No scripts, no fonts, no images: nothing to fetch."""

from __future__ import annotations

from midstream.demo.charts import NUM_BINS
from midstream.demo.html import escape, tag

Rgb = tuple[int, int, int]

LIGHT: tuple[Rgb, Rgb, Rgb] = ((33, 90, 168), (244, 242, 238), (201, 84, 12))
"""Colours of the negative end, the middle and the positive end, on a light page."""

DARK: tuple[Rgb, Rgb, Rgb] = ((98, 164, 255), (38, 40, 44), (255, 146, 64))

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the report loads nothing."""

CSS = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #1d1c1a; --soft: #5f5b55;
  --line: #e3dfd8; --a: #c9540c; --b: #215aa8; --shadow: 0 1px 2px #0000000d; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font: 17px/1.55 Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif; }
main { max-width: 72rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1, h2, h3, dt, figcaption, .chip, table, svg text, summary, .lead-label {
  font-family: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -0.02em;
  margin: 0 0 0.75rem; text-wrap: balance; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin: 3.5rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 2rem 0 0.6rem; }
p { max-width: 44rem; margin: 0.5rem 0 1rem; }
.lead { font-size: 1.12rem; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 1rem;
  margin: 1.75rem 0 0; padding: 1rem 0; border-block: 1px solid var(--line); }
dt { font-size: 0.72rem; text-transform: uppercase; letter-spacing: 0.06em; color: var(--soft); }
dd { margin: 0.1rem 0 0; overflow-wrap: anywhere; font-size: 0.95rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
  gap: 1.25rem; margin: 1rem 0; }
.pair figure { margin: 0; }
figure { margin: 1.25rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; box-shadow: var(--shadow); min-width: 0; }
figcaption { font-size: 0.85rem; color: var(--soft); margin-bottom: 0.6rem; }
figcaption strong { color: var(--ink); }
.scroll { overflow-x: auto; }
svg { display: block; }
svg.chart { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); } .guess { stroke: var(--soft); stroke-dasharray: 3 4; }
.marked { stroke: var(--ink); stroke-width: 1; opacity: 0.55; }
svg text.marked-label { fill: var(--ink); font-weight: 600; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line-a { stroke: var(--a); } .line-b { stroke: var(--b); }
.dot-a { fill: var(--a); } .dot-b { fill: var(--b); }
.question { stroke: var(--soft); stroke-width: 1; opacity: 0.35; }
.key-a { color: var(--a); font-weight: 600; } .key-b { color: var(--b); font-weight: 600; }
svg text.token { fill: var(--ink); font-size: 12px; }
.heatmap rect { shape-rendering: crispEdges; }
.heatmap rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.heatmap .marked-row { fill: none; stroke: var(--ink); stroke-width: 1.25; pointer-events: none; }
.legend { display: flex; align-items: center; gap: 0.6rem; font-size: 0.85rem; color: var(--soft);
  flex-wrap: wrap; }
.ramp { display: inline-flex; border-radius: 4px; overflow: hidden; }
.ramp i { width: 9px; height: 14px; display: block; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 11.5rem), 1fr));
  gap: 0.75rem; }
.answer { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.75rem 0.85rem; border-top: 4px solid var(--edge); box-shadow: var(--shadow);
  min-width: 0; }
.answer p { margin: 0.4rem 0 0; font-size: 0.94rem; line-height: 1.45; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.chip { font-size: 0.78rem; display: flex; justify-content: space-between; gap: 0.5rem;
  color: var(--soft); }
.chip strong { color: var(--ink); font-size: 0.88rem; }
table { border-collapse: collapse; font-size: 0.82rem; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; }
summary { cursor: pointer; font-size: 0.9rem; padding: 0.4rem 0; }
@media (max-width: 34rem) {
  svg.chart text { font-size: 16px; }
  dl { grid-template-columns: 1fr 1fr; }
}
"""

DARK_CSS = """
  :root { --page: #161719; --card: #1e2023; --ink: #ece9e4; --soft: #a39f98; --line: #34373c;
    --a: #ff9240; --b: #62a4ff; --shadow: none; }
"""


def page(title: str, body: str, data: str) -> str:
    """Return the whole document around a body and a data block, which must be escaped."""
    head = "\n".join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            tag("title", escape(title)),
            tag("style", style_sheet()),
        ]
    )
    main = tag("main", body)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n{main}\n{data}\n</body>\n</html>\n"
    )


def style_sheet() -> str:
    """Return the CSS rules, with the diverging colours for light and dark pages."""
    dark = DARK_CSS + _bins(*DARK)
    return f"{CSS}{_bins(*LIGHT)}\n@media (prefers-color-scheme: dark) {{{dark}\n}}\n"


def _bins(low: Rgb, middle: Rgb, high: Rgb) -> str:
    """Return the rules of each bin: fill of SVG cells, background or edge of HTML elements."""
    half = NUM_BINS // 2
    rules = []
    for index in range(NUM_BINS):
        end, share = (low, half - index) if index < half else (high, index - half)
        mixed = (round(m + (e - m) * share / half) for m, e in zip(middle, end, strict=True))
        color = "#" + "".join(f"{part:02x}" for part in mixed)
        rules.append(f".b{index} {{ fill: {color}; --edge: {color}; }}")
        rules.append(f".ramp .b{index} {{ background: {color}; }}")
    return "\n".join(rules)
