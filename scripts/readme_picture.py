#!/usr/bin/env python3
"""Make docs/images/readme.png: one prompt, three requests of one batch, as README.md steers them.

    .venv/bin/python scripts/readme_picture.py [page.html]

Writes the page, and takes the picture with scripts/screenshot.py. Every colour is a projection of a
captured vector on the direction of its layer: −1 is the mean of the negative class, +1 of the
positive one.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from midstream import LLM, Capture, Directions, SamplingParams
from midstream.viz import Chart, heatmap
from midstream.viz.color_scale import ColorScale
from midstream.viz.markup import escape, tag
from midstream.viz.picture import document

ROOT = Path(__file__).resolve().parents[1]
STRENGTHS = (-0.5, 0.0, 0.5)
HEADS = ("steered −0.5", "plain", "steered +0.5")
LIMITS = (-1.5, 1.5)
LAYERS = range(10, 29)
CSS = """
body.midstream { margin: 0; background: var(--page); font: 15px/1.4 var(--sans); }
body.midstream main { width: 1280px; height: 640px; box-sizing: border-box; padding: 24px 34px; }
h1 { font: 600 27px/1.2 var(--sans); margin: 0 0 3px; }
.sub { color: var(--soft); margin: 0 0 14px; }
.three { display: grid; grid-template-columns: repeat(3, 1fr); gap: 20px; }
.col { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.col { padding: 14px 16px; }
.col h2 { font: 600 16px/1 var(--sans); margin: 0 0 9px; }
.col p.t { font: 21px/1.6 var(--serif); margin: 0; height: 101px; overflow: hidden; }
.col p.t span { background: var(--c); color: var(--i); border-radius: 3px; padding: .12em 0; }
.col p.t span { white-space: pre-wrap; }
img { display: block; width: 1212px; margin: 16px 0 0; }
.base { margin-top: 10px; color: var(--soft); }
"""


def main(page: Path) -> None:
    """Run the README's requests with captures, and write the page and the picture."""
    llm = LLM(
        str(ROOT / ".models/SmolLM2-135M-Instruct"),
        dtype="float32", enforce_eager=True, gpu_memory_utilization=0.5,
    )  # fmt: skip
    things = ["The food was", "Our holiday was", "The film was", "My job is", "My day was"]
    mood = Directions.fit(
        llm, [f"{it} wonderful." for it in things], [f"{it} terrible." for it in things]
    )
    best = mood[15]
    edits = [[best.steer(scale)] if scale else None for scale in STRENGTHS]
    chat = [{"role": "user", "content": "How was your day?"}]
    outs = llm.chat(
        [chat] * 3,
        SamplingParams(max_tokens=24, temperature=0),
        edits=edits,
        capture=Capture(layers="all", positions="generated"),
    )
    tokenizer = llm.get_tokenizer()
    columns, charts = [], []
    for head, out in zip(HEADS, outs, strict=True):
        rows = np.stack(
            [projections(out.activations["resid_post", one], mood[one]) for one in LAYERS]
        )
        words = [tokenizer.decode([one]) for one in out.outputs[0].token_ids][: rows.shape[1]]
        columns.append(column(head, words, rows))
        charts.append(cells(words, rows, best.layer))
    sub = (
        "“How was your day?”, SmolLM2-135M-Instruct. A direction between five glad and five sad"
        f" sentences is added at layer {best.layer}."
    )
    base = (
        f"Layers {LAYERS[0]} to {LAYERS[-1]}; of the text: layer {LAYERS[-1]}. −1 is the mean of"
        " the sad sentences, +1 that of the glad ones."
    )
    body = (
        tag("h1", "One prompt, three requests, one batch")
        + tag("p", escape(sub), "sub")
        + tag("div", "".join(columns), "three")
        + f'<img src="{source_of(charts)}" alt="">'
        + tag("div", escape(base), "base")
    )
    page.write_text(document("midstream", body, css=CSS), encoding="utf-8")
    shot = [sys.executable, ROOT / "scripts/screenshot.py", page, ROOT / "docs/images/readme.png"]
    subprocess.run([*shot, "--width", "1280", "--height", "640", "--scale", "1.5"], check=True)


def projections(rows: object, direction: object) -> np.ndarray:
    """Return a number per row: −1 at the negative class mean, +1 at the positive one."""
    values = np.asarray(rows, dtype=np.float64)
    return 2 * (values - direction.midpoint) @ direction.unit / direction.gap


def column(head: str, words: list[str], rows: np.ndarray) -> str:
    """Return one answer: its tokens, coloured by the last row."""
    colors = ColorScale.of(np.array(LIMITS), 0.0, LIMITS)
    spans = "".join(
        tag("span", escape(word), colors.style(float(value)))
        for word, value in zip(words, rows[-1], strict=True)
    )
    return tag("div", tag("h2", escape(head)) + tag("p", spans, "t"), "col")


def cells(words: list[str], rows: np.ndarray, layer: int) -> Chart:
    """Return the rows of all layers of one answer."""
    return heatmap(
        rows,
        LAYERS,
        words,
        row_title="layer",
        value_title="projection on the layer's direction",
        limits=LIMITS,
        marked=LAYERS.index(layer),
    )


def source_of(charts: list[Chart]) -> str:
    """Return charts side by side, with one colour bar, as the source of an image."""
    sizes = dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 10)
    file = io.BytesIO()
    with style.context(["midstream.viz.paper", sizes]):
        figure = Figure(figsize=(12.6, 3.35), layout="constrained")
        Chart.beside("", charts).plot(figure.subplots(1, len(charts), sharey=True))
        figure.savefig(file, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "readme.html").resolve())
