"""Style sheet of the report's page, besides that of pictures."""

from __future__ import annotations

CSS = """
* { box-sizing: border-box; }
body.midstream { margin: 0; background: var(--page); font: 17px/1.55 var(--serif); }
main { max-width: 74rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1, h2, h3, dt, nav, table, summary, a.download { font-family: var(--sans); }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -0.02em;
  margin: 0 0 0.75rem; text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin: 3.5rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 2rem 0 0.6rem; }
section { scroll-margin-top: 1rem; }
p { max-width: 46rem; margin: 0.5rem 0 1rem; overflow-wrap: anywhere; }
a { color: light-dark(#215aa8, #62a4ff); }
.lead { font-size: 1.12rem; color: var(--soft); }
nav { margin: 1.5rem 0 0; font-size: 0.92rem; display: flex; flex-wrap: wrap; gap: 0.3rem 1.4rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 1rem;
  margin: 1.75rem 0 0; padding: 1rem 0; border-block: 1px solid var(--line); }
dt { font-size: 0.72rem; text-transform: uppercase; letter-spacing: 0.06em; color: var(--soft); }
dd { margin: 0.1rem 0 0; overflow-wrap: anywhere; font-size: 0.95rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr));
  gap: 1.25rem; margin: 1rem 0; align-items: start; }
.pair figure.midstream { margin: 0; width: auto; }
.midstream .pair svg.chart { width: 100%; }
.maps { display: flex; flex-wrap: wrap; gap: 1.25rem; margin: 1rem 0; align-items: start; }
.maps figure.midstream { margin: 0; }
.scroll { overflow-x: auto; }
section > details table, section > .scroll table { border-collapse: collapse; font-size: 0.85rem;
  width: 100%; font-variant-numeric: tabular-nums; }
section > details :is(th, td), section > .scroll :is(th, td) { text-align: left;
  vertical-align: top; padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); }
section > details th, section > .scroll th { color: var(--soft); font-weight: 600; }
summary { cursor: pointer; font-size: 0.9rem; padding: 0.4rem 0; }
pre { overflow-x: auto; padding: 0.9rem 1rem; background: var(--card); max-width: 100%;
  border: 1px solid var(--line); border-radius: 10px; font: 13px/1.5 ui-monospace, SFMono-Regular,
  Menlo, Consolas, "DejaVu Sans Mono", monospace; }
a.download { display: inline-block; padding: 0.45rem 0.9rem; border: 1px solid var(--line);
  border-radius: 8px; background: var(--card); font-size: 0.9rem; text-decoration: none; }
a:focus-visible, summary:focus-visible { outline: 3px solid var(--ink); outline-offset: 2px; }
@media (max-width: 34rem) {
  main { padding: 1.75rem 0.9rem 3rem; }
  dl { grid-template-columns: 1fr 1fr; }
  figure.midstream { padding: 0.75rem; }
}
@media print { nav, .readout { display: none; } figure.midstream { break-inside: avoid; } }
"""
