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
# Lines of a curve, in order; told apart by their dashes too.
LINES = (
    ("#c9540c", "#ff9240", ""),
    ("#215aa8", "#62a4ff", "7 3"),
    ("#3a7d44", "#7ccb87", "2 3"),
    ("#7d4fa8", "#c39bea", "9 3 2 3"),
    ("#8a6d12", "#d8b64c", "4 2"),
    ("#5d6570", "#9aa4b2", "1 2"),
)

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
.midstream table.heat.heat { border-collapse: separate; border-spacing: 1px; margin: 0;
  width: auto; font: inherit; border: 0; table-layout: auto; }
.midstream table.heat.heat tr { background: none; border: 0; }
.midstream table.heat.heat th { font-weight: 400; color: var(--soft); border: 0; background:
  var(--card); padding: 0 .3rem; white-space: pre; font-size: 11px; line-height: 1.2; }
.midstream table.heat.heat th.side { position: sticky; left: 0; z-index: 1; text-align: right;
  max-width: 12rem; overflow: hidden; text-overflow: ellipsis; }
.midstream table.heat.heat th.axis { text-align: left; font-size: 12px; padding-bottom: 2px; }
.midstream table.heat.heat th.top { text-align: center; vertical-align: bottom; color: var(--ink);
  max-width: 9rem; overflow: hidden; text-overflow: ellipsis; }
.midstream table.heat.heat th.top span.up { display: inline-block; writing-mode: vertical-rl;
  transform: rotate(180deg); max-height: 8rem; overflow: hidden; line-height: 1; }
.midstream table.heat.heat th .rare { display: inline-block; width: 0; height: 0;
  overflow: hidden; }
.midstream table.heat.heat td { border: 0; padding: 0 .35rem; height: 20px; min-width: 2.6rem;
  text-align: center; background: var(--c, transparent); color: var(--i, var(--soft));
  font-size: 11px; line-height: 18px; white-space: pre; max-width: 9rem; overflow: hidden;
  text-overflow: ellipsis; font-variant-numeric: tabular-nums; border-radius: 2px; }
.midstream table.heat.heat.dense { border-spacing: 0; }
.midstream table.heat.heat.dense td { font-size: 0; padding: 0; height: 12px; line-height: 0;
  min-width: 22px; width: 22px; border-radius: 0; }
.midstream table.heat.heat.dense.many td { min-width: 11px; width: 11px; }
.midstream table.heat.heat.dense th.side { line-height: 12px; }
.midstream table.heat.heat tr.marked td { box-shadow: inset 0 1.5px var(--ink),
  inset 0 -1.5px var(--ink); }
.midstream table.heat.heat tr.marked th.side { color: var(--ink); font-weight: 700; }
.midstream .text { font: 15px/1.9 var(--serif); white-space: pre-wrap; overflow-wrap: anywhere;
  max-width: 46rem; }
.midstream .text .c { background: var(--c, transparent); color: var(--i, var(--ink));
  padding: .18em 0; border-radius: 2px; box-shadow: inset -1px 0 var(--card); }
.midstream svg { display: block; width: 34rem; max-width: 100%; height: auto; overflow: visible; }
.midstream svg text { fill: var(--soft); font: 12px var(--sans); }
.midstream svg .name { fill: var(--ink); font-weight: 600; }
.midstream svg .middle { text-anchor: middle; } .midstream svg .end { text-anchor: end; }
.midstream svg .rule { stroke: var(--line); }
.midstream svg .level { stroke: var(--soft); stroke-dasharray: 3 4; }
.midstream svg .mark { stroke: var(--ink); opacity: .55; }
.midstream svg path { fill: none; stroke-width: 2; stroke-linejoin: round; }
.midstream svg path.back { stroke: var(--soft); stroke-width: 1; opacity: .4; }
.midstream svg rect.c { fill: transparent; } .midstream svg rect.c:focus { outline-width: 2px; }
.midstream svg rect.on { fill: var(--ink); fill-opacity: .07; outline: none; }
.midstream .keys { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: 0 0 .4rem; }
.midstream .keys span { display: inline-flex; align-items: center; gap: .4rem; }
.midstream .keys svg { width: 26px; height: 8px; }
.midstream details { margin-top: .5rem; color: var(--soft); }
.midstream summary { cursor: pointer; }
.midstream table.numbers.numbers { border-collapse: collapse; margin: .4rem 0 0; font: inherit;
  font-variant-numeric: tabular-nums; border: 0; }
.midstream table.numbers.numbers th, .midstream table.numbers.numbers td { text-align: right;
  padding: .15rem .8rem .15rem 0; border: 0; border-bottom: 1px solid var(--line);
  background: none; color: var(--ink); white-space: nowrap; }
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
@media (max-width: 34rem) { .midstream svg.chart text { font-size: 17px; } }
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
  const t = c.querySelector("title");
  if (t) t.remove();
};
const go = c => {
  c.closest("[data-columns]").querySelectorAll(".c[tabindex]").forEach(e => e.tabIndex = -1);
  c.setAttribute("tabindex", "0");
  c.focus();
};
document.addEventListener("pointerover", e => { const c = cellOf(e.target); if (c) show(c); });
document.addEventListener("pointerout", e => {
  const c = cellOf(e.target), held = cellOf(document.activeElement);
  if (c && held && held !== c && held.closest("figure") === c.closest("figure")) show(held);
});
document.addEventListener("focusin", e => { const c = cellOf(e.target); if (c) show(c); });
document.addEventListener("click", e => { const c = cellOf(e.target); if (c) go(c); });
document.addEventListener("keydown", e => {
  const c = cellOf(e.target);
  if (!c || e.altKey || e.metaKey || e.shiftKey) return;
  const grid = c.closest("[data-columns]"), all = [...grid.querySelectorAll(".c")];
  const n = +grid.dataset.columns, at = all.indexOf(c), start = at - at % n;
  const last = all.length - 1;
  const to = {
    ArrowRight: at % n < n - 1 ? at + 1 : at, ArrowLeft: at % n ? at - 1 : at,
    ArrowDown: at + n, ArrowUp: at - n,
    Home: e.ctrlKey ? 0 : start, End: e.ctrlKey ? last : start + n - 1,
  }[e.key];
  if (to === undefined || !all[to] || to === at) return;
  e.preventDefault();
  go(all[to]);
});
})();
"""


def style_sheet() -> str:
    """Return the rules of pictures, with the colours of light and dark pages."""
    names = " ".join(f"--{name}: light-dark({a}, {b});" for name, (a, b) in COLORS.items())
    fonts = (
        '--sans: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;'
        ' --serif: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif;'
    )
    lines = "\n".join(
        f".midstream .line{n} {{ stroke: light-dark({light}, {dark});"
        f" stroke-dasharray: {dashes or 'none'}; }}\n"
        f".midstream .dot{n} {{ fill: light-dark({light}, {dark}); }}"
        for n, (light, dark, dashes) in enumerate(LINES)
    )
    return f"{_CSS.replace('@VARIABLES@', f'{names} {fonts}')}{_bins()}\n{lines}\n"


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
