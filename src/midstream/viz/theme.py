"""Style sheet and script of pictures: no fonts, no images, nothing to fetch."""

from __future__ import annotations

import base64
import hashlib

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
# Lines of a curve, in order; told apart by their dashes too. None has the colour of a scale's end,
# which stays the same on a dark page.
LINES = (
    ("#c8540c", "#ff9240", ()),
    ("#205aa8", "#62a4ff", (5, 2)),
    ("#3a7d44", "#7ccb87", (1.5, 2)),
    ("#7d4fa8", "#c39bea", (6, 2, 1.5, 2)),
    ("#8a6d12", "#d8b64c", (3, 1.5)),
    ("#5d6570", "#9aa4b2", (1, 1.5)),
)
VARIABLES = {
    **{light: f"var(--{name})" for name, (light, _) in COLORS.items() if name != "card"},
    **{light: f"var(--line{nth})" for nth, (light, *_) in enumerate(LINES)},
}
"""Colours of a chart, by which a page's light and dark ones replace them."""

# The classes of notebooks' and editors' themes come after the system's own setting.
_CSS = """
.midstream { color-scheme: light dark; color: var(--ink); @VARIABLES@ }
[data-jp-theme-light="true"] .midstream, .vscode-light .midstream { color-scheme: light; }
[data-jp-theme-light="false"] .midstream, .vscode-dark .midstream, html[theme="dark"] .midstream {
  color-scheme: dark; }
figure.midstream { box-sizing: border-box; width: fit-content; max-width: 100%; min-width: 0;
  margin: 1rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; font: 13px/1.5 var(--sans); }
figure.midstream.wide { width: auto; }
.midstream figcaption { font-weight: 600; font-size: 14px; margin: 0 0 .6rem; color: var(--ink);
  overflow-wrap: anywhere; }
.midstream .scroll { overflow-x: auto; }
.midstream .c { cursor: default; }
.midstream .c:focus { outline: 3px solid var(--ink); outline-offset: -1px; }
.midstream .on { outline: 2px solid var(--ink); outline-offset: -1px; }
.midstream .foot { display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; margin-top: .7rem;
  align-items: center; justify-content: space-between; color: var(--soft); }
.midstream .readout { flex: 1 1 14rem; min-height: 1.5em; white-space: pre-wrap;
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.midstream .readout.filled { color: var(--ink); }
.midstream .legend { display: inline-flex; align-items: center; gap: .5rem; flex-wrap: wrap;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.midstream .ramp { display: inline-flex; border-radius: 3px; overflow: hidden;
  border: 1px solid var(--line); }
.midstream .ramp i { width: 6px; height: 12px; background: var(--c); }
.midstream .text { font: 15px/1.9 var(--serif); white-space: pre-wrap; overflow-wrap: anywhere;
  max-width: 46rem; }
.midstream .text .c { background: var(--c, transparent); color: var(--i, var(--ink));
  padding: .18em 0; border-radius: 2px; box-shadow: inset -1px 0 var(--card); }
.midstream svg.chart { display: block; max-width: 100%; height: auto; overflow: visible; }
.midstream svg.chart.wide { max-width: none; }
.midstream svg.chart * { stroke-linejoin: round; font-family: var(--sans); }
.midstream details { margin-top: .5rem; color: var(--soft); }
.midstream summary { cursor: pointer; }
.midstream pre.numbers { margin: .4rem 0 0; padding: 0; border: 0; background: none;
  color: var(--ink); font: 11px/1.4 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; }
.midstream .prompt { color: var(--soft); margin: 0 0 .6rem; max-width: 46rem; }
.midstream .answers { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 11.5rem), 1fr)); }
.midstream .answer { border: 1px solid var(--line); border-top: 4px solid var(--c, var(--line));
  border-radius: 10px; padding: .6rem .8rem .7rem; min-width: 0; }
.midstream .answer .chip { display: grid; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.midstream .answer .chip strong { color: var(--ink); font-size: 14px; }
.midstream .answer p { margin: .4rem 0 0; font: 15px/1.45 var(--serif); white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""

PAGE_CSS = """
body.midstream { margin: 0; background: var(--page); font: 17px/1.55 var(--serif); }
body.midstream main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
"""

SCRIPT = """
(() => { "use strict";
if (window.midstreamPictures) return;
window.midstreamPictures = true;
const cellOf = t => t instanceof Element ? t.closest(".midstream .c") : null;
const show = c => {
  const f = c.closest("figure.midstream"), out = f && f.querySelector(".readout");
  if (!out) return;
  f.querySelectorAll(".on").forEach(e => e.classList.remove("on"));
  c.classList.add("on");
  out.textContent = c.getAttribute("aria-label");
  out.classList.add("filled");
  c.removeAttribute("title");
};
document.addEventListener("pointerover", e => { const c = cellOf(e.target); if (c) show(c); });
document.addEventListener("pointerout", e => {
  const c = cellOf(e.target), held = cellOf(document.activeElement);
  if (c && held && held !== c && held.closest("figure") === c.closest("figure")) show(held);
});
document.addEventListener("focusin", e => { const c = cellOf(e.target); if (c) show(c); });
const go = c => {
  c.parentElement.querySelectorAll(".c[tabindex]").forEach(e => e.tabIndex = -1);
  c.tabIndex = 0;
  c.focus();
};
document.addEventListener("click", e => { const c = cellOf(e.target); if (c) go(c); });
document.addEventListener("keydown", e => {
  const c = cellOf(e.target);
  if (!c || e.altKey || e.metaKey || e.shiftKey || e.ctrlKey) return;
  const to = {
    ArrowRight: c.nextElementSibling, ArrowLeft: c.previousElementSibling,
    Home: c.parentElement.firstElementChild, End: c.parentElement.lastElementChild,
  }[e.key];
  if (!to || to === c) return;
  e.preventDefault();
  go(to);
});
})();
"""


def style_sheet() -> str:
    """Return the rules of pictures, with the colours of light and dark pages."""
    pairs = {**COLORS, **{f"line{nth}": line[:2] for nth, line in enumerate(LINES)}}
    names = " ".join(f"--{name}: light-dark({a}, {b});" for name, (a, b) in pairs.items())
    fonts = (
        '--sans: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;'
        ' --serif: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif;'
    )
    return f"{_CSS.replace('@VARIABLES@', f'{names} {fonts}')}{_bins()}\n"


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
    """Return the source that allows an inline style sheet or script, for a security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
