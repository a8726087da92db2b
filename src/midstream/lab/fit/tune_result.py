"""`Tuning`: effect and coherence of every layer and strength that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit.guards import Guard, MaxKL, MaxPerplexity
from midstream.steering.listing import text_table
from midstream.viz import Chart, heatmap
from midstream.viz.chart import Charted
from midstream.viz.color_scale import written

Grid = NDArray[np.float64]


@dataclass(frozen=True)
class TuningCell:
    """One layer and strength.

    Attributes:
        layer, scale: the direction that is added, and how often.
        effect: what the answers show of it, the mean over the prompts; NaN without answers.
        perplexity: of the answers to the unsteered model.
        kl: mean divergence of the first tokens in nats, see `MaxKL`; None: not measured.
        holds: whether the guard holds; True without one.
        answers: the texts, one per prompt.
    """

    layer: int
    scale: float
    effect: float
    perplexity: float
    kl: float | None
    holds: bool
    answers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tuning(Charted):
    """Effect and coherence by layer and strength.

    Attributes:
        layers, scales: what was tried; the rows and columns of the grids.
        effect: float64 [layers, scales]; see `TuningCell`, as for the next two.
        perplexity: float64 [layers, scales].
        kl: float64 [layers, scales]; None: not measured.
        plain_effect, plain_perplexity: of the unsteered model's own answers.
        answers: texts by (layer, scale), one per prompt.
        plain_answers: the unsteered model's own.
        guard: the guard; None: every cell holds.
    """

    layers: tuple[int, ...]
    scales: tuple[float, ...]
    effect: Grid
    perplexity: Grid
    kl: Grid | None
    plain_effect: float
    plain_perplexity: float
    answers: Mapping[tuple[int, float], Sequence[str]]
    plain_answers: Sequence[str]
    guard: Guard | None

    @property
    def holds(self) -> NDArray[np.bool_]:
        """Where the guard holds, bool [layers, scales]; not where there were no answers."""
        if isinstance(self.guard, MaxPerplexity):
            return self.perplexity <= self.guard.ratio * self.plain_perplexity
        if isinstance(self.guard, MaxKL):
            assert self.kl is not None
            return self.kl <= self.guard.nats
        return np.isfinite(self.effect)

    def __getitem__(self, key: tuple[int, float]) -> TuningCell:
        """Return the cell of a (layer, scale)."""
        if key not in self.answers:
            raise SpecError(
                "", f"expected a layer of {list(self.layers)} and a scale of {list(self.scales)}"
            )
        place = self.layers.index(key[0]), self.scales.index(key[1])
        return TuningCell(
            self.layers[place[0]],
            self.scales[place[1]],
            float(self.effect[place]),
            float(self.perplexity[place]),
            None if self.kl is None else float(self.kl[place]),
            bool(self.holds[place]),
            tuple(self.answers[key]),
        )

    def __iter__(self) -> Iterator[TuningCell]:
        return (self[layer, scale] for layer in self.layers for scale in self.scales)

    @property
    def best(self) -> TuningCell:
        """The cell with the largest effect of those where the guard holds; the first of equals.

        Raises:
            SpecError: it holds nowhere.
        """
        cells = [cell for cell in self if cell.holds and np.isfinite(cell.effect)]
        if not cells:
            raise SpecError("guard", f"{self.guard} holds nowhere; try smaller scales:\n{self}")
        return max(cells, key=lambda cell: cell.effect)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row per cell: layer, scale, effect, perplexity, kl, holds.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        MissingExtraError.require("pandas", "to_pandas")
        import pandas

        names = ("layer", "scale", "effect", "perplexity", "kl", "holds")
        return pandas.DataFrame([{name: getattr(cell, name) for name in names} for cell in self])

    def __str__(self) -> str:
        rows = [("plain", "0", *_numbers(self.plain_effect, self.plain_perplexity, None), "")]
        for cell in self:
            numbers = _numbers(cell.effect, cell.perplexity, cell.kl)
            rows.append((str(cell.layer), f"{cell.scale:g}", *numbers, "" if cell.holds else "no"))
        return text_table(("layer", "scale", "effect", "perplexity", "KL", "holds"), rows)

    def __repr__(self) -> str:
        return f"Tuning({len(self.layers)} layers × {len(self.scales)} scales)"

    def picture(self) -> Chart:
        """Return heatmaps by layer and scale: the effect, by which `best` is chosen, and the
        perplexity, both against the plain answers, and the KL divergence if it was measured. `best`
        has a ★; where the guard does not hold is a ×.
        """
        ratio = self.perplexity / self.plain_perplexity
        grids: list[tuple[str, Grid, float | None]] = [
            ("effect, less that of plain answers", self.effect - self.plain_effect, 0.0),
            ("perplexity, ratio to plain answers", ratio, None),
        ]
        if self.kl is not None:
            grids.append(("KL of the first tokens (nats)", self.kl, None))
        signs = np.where(self.holds, "", " ×").tolist()
        if (self.holds & np.isfinite(self.effect)).any():
            best = self.best
            signs[self.layers.index(best.layer)][self.scales.index(best.scale)] = " ★"
        charts = [
            heatmap(
                values,
                self.layers,
                [written(scale, "g") for scale in self.scales],
                title=name.partition(",")[0].partition(" ")[0],
                row_title="layer",
                column_title="scale",
                value_title=name,
                center=center,
                texts=[
                    [f"{written(value, '.2f')}{sign}" for value, sign in zip(*line, strict=True)]
                    for line in zip(values, signs, strict=True)
                ],
            )
            for name, values, center in grids
        ]
        return Chart.beside(f"{self!r}; ★: best, ×: the guard does not hold", charts)


def _numbers(effect: float, perplexity: float, kl: float | None) -> tuple[str, str, str]:
    return f"{effect:.3f}", f"{perplexity:.3g}", "" if kl is None else f"{kl:.3g}"
