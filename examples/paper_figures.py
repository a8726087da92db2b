"""Three figures for a paper, in one PDF: norms, accuracy by layer, and a dose-response curve.

Each page is a figure of 3.3 inches, the width of a column, with text that stays text, error bars,
units, and lines that are told apart in greyscale too. Writes `figures.pdf`, and `figures.png` with
all three side by side. Needs the extras `plot` and `fit`.

    python examples/paper_figures.py [--model FOLDER]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import model_from, show, start
from matplotlib import style
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from midstream import LLM, Directions, Logits, Norms, SamplingParams
from midstream.lab.demo.prompts import PAIRS
from midstream.viz import Chart, curve

WIDTH, HEIGHT = 3.3, 2.3  # inches
PROMPTS = {
    "prose": "The old lighthouse stood at the end of the bay, and nobody had lit its lamp since.",
    "code": "def mean(values):\n    total = sum(values)\n    return total / len(values)",
    "French": "Le vieux phare se dressait au bout de la baie, et personne ne l'allumait plus.",
}
LAYERS, SCALES = (8, 14, 20), (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
OPENINGS = (
    "The concert last night was",
    "To be honest, the service here is",
    "I think that this song is",
    "Living in this city is",
    "The view from our room was",
    "My first week at school was",
)
GLAD = (" good", " great", " wonderful", " fun")
SAD = (" bad", " terrible", " awful", " boring")


def norms(llm: LLM) -> tuple[Chart, dict[str, np.ndarray]]:
    """Draw the median norm over the tokens of each prompt, by layer; the first token alone."""
    outputs = llm.generate(
        list(PROMPTS.values()), SamplingParams(max_tokens=1), capture=Norms("all"), use_tqdm=False
    )
    layers = [layer for _, layer in outputs[0].norms]
    rows = [np.stack([part.values for part in output.norms.values()]) for output in outputs]
    lines = {name: np.median(row[:, 1:], axis=1) for name, row in zip(PROMPTS, rows, strict=True)}
    lines["first token"] = np.mean([row[:, 0] for row in rows], axis=0)
    chart = curve(
        layers, lines, x_title="layer", y_title="L2 norm of the residual stream", log=True
    )
    return chart, lines


def accuracy(fitted: Mapping[str, Directions]) -> Chart:
    """Draw the held-out accuracy of each layer's direction, with standard errors over folds."""
    layers = next(iter(fitted.values())).layers
    lines, ranges = {}, {}
    for name, directions in fitted.items():
        scores = [directions.scores[layer] for layer in layers]
        lines[name] = values = np.array([100 * score.accuracy for score in scores])
        errors = np.array([100 * score.accuracy_error for score in scores])
        ranges[name] = [values - errors, values + errors]
    return curve(
        layers,
        lines,
        ranges=ranges,
        x_title="layer",
        y_title="held-out accuracy (%)",
        level=50.0,
    )


def doses(llm: LLM, directions: Directions) -> tuple[Chart, dict[str, np.ndarray]]:
    """Draw log p(glad word) − log p(sad word) by strength, with standard errors over openings."""
    asked = list(itertools.product(LAYERS, SCALES, OPENINGS))
    outputs = llm.generate(
        [opening for _, _, opening in asked],
        SamplingParams(max_tokens=1),
        capture=Logits(tokens=GLAD + SAD, positions="last_prompt"),
        steer=[[directions[layer].steer(scale)] for layer, scale, _ in asked],
        use_tqdm=False,
    )
    logits = torch.cat([output.logits.values for output in outputs])
    odds = logits[:, : len(GLAD)].logsumexp(1) - logits[:, len(GLAD) :].logsumexp(1)
    lines, ranges = {}, {}
    cells = odds.numpy().reshape(len(LAYERS), len(SCALES), len(OPENINGS))
    for layer, line in zip(LAYERS, cells, strict=True):
        lines[f"layer {layer}"] = values = line.mean(axis=1)
        errors = line.std(axis=1, ddof=1) / np.sqrt(len(OPENINGS))
        ranges[f"layer {layer}"] = [values - errors, values + errors]
    chart = curve(
        SCALES,
        lines,
        ranges=ranges,
        x_title="strength (distances between the class means)",
        y_title="log-odds of a glad word (nats)",
        level=0.0,
    )
    return chart, lines


def save(charts: Sequence[Chart], path: Path) -> None:
    """Write charts as the pages of a PDF, and side by side as a PNG beside it."""
    with style.context("midstream.viz.paper"):
        with PdfPages(path) as pdf:
            for chart in charts:
                figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
                chart.plot(figure.subplots())
                pdf.savefig(figure)
        figure = Figure(figsize=(WIDTH * len(charts), HEIGHT), layout="constrained")
        Chart.beside("", charts).plot(figure.subplots(1, len(charts)))
        figure.savefig(path.with_suffix(".png"), dpi=160)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the example.

    Returns:
        `path` of the PDF; `norms` by line, [layers]; `fitted`, the directions by method; `doses`,
        the log-odds by line, [scales].
    """
    llm = start(model_from(arguments, __doc__))
    glad, sad = zip(*PAIRS, strict=True)
    fitted = {
        name: Directions.fit(llm, glad, sad, method)
        for name, method in (("difference of means", "mean"), ("logistic regression", "logistic"))
    }
    first, by_prompt = norms(llm)
    third, by_scale = doses(llm, fitted["difference of means"])
    path = Path("figures.pdf").resolve()
    save([first, accuracy(fitted), third], path)
    rows = [
        (f"{scale:+.1f}", *(float(line[n]) for line in by_scale.values()))
        for n, scale in enumerate(SCALES)
    ]
    show("Log-odds of a glad word", ["strength", *by_scale], rows)
    return {"path": path, "norms": by_prompt, "fitted": fitted, "doses": by_scale}


if __name__ == "__main__":
    main()
