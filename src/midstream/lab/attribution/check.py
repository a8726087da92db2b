"""`AttributionCheck`: estimates of patches beside the same patches in an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.sweep import Metric, Sweep
from midstream.lab.sweep.job import SweepJob, SweepRun
from midstream.lab.sweep.metrics import check_logprobs_mode
from midstream.plan.shape import ModelShape
from midstream.validation import kind


@dataclass(frozen=True, eq=False)
class AttributionCheck:
    """Estimated and measured patches of the cells with the largest estimates.

    Attributes:
        cells: a dict for each cell, in descending order of its estimated effect: the label of each
            dimension, `token`, `estimate` and `measured`, both values of the metric.
        measured: the measured patches as a sweep; all other cells are nan.
        estimated: the estimates of all cells.
    """

    cells: tuple[dict[str, Any], ...]
    measured: Sweep
    estimated: Sweep

    @property
    def estimates(self) -> NDArray[np.float64]:
        """The estimated metric of each cell."""
        return np.array([cell["estimate"] for cell in self.cells])

    @property
    def measurements(self) -> NDArray[np.float64]:
        """The measured metric of each cell."""
        return np.array([cell["measured"] for cell in self.cells])

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimates and measurements; nan for fewer than three cells, or
        if either does not vary. Cells of similar size correlate less than those of a whole grid.
        """
        if len(self.cells) < 3 or not (np.ptp(self.estimates) and np.ptp(self.measurements)):
            return float("nan")
        return float(np.corrcoef(self.estimates, self.measurements)[0, 1])

    def __str__(self) -> str:
        names = [*self.measured.dims, "token", "estimate", "measured"]
        rows = [names]
        for cell in self.cells:
            rows.append([_show(cell[name]) for name in names])
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"correlation {self.correlation:.3f}"])

    __repr__ = __str__


def check_same_model(llm: Any, shape: ModelShape) -> None:
    """Check that the model of a `midstream.LLM` has the dimensions of a twin."""
    if not hasattr(llm, "info") or not hasattr(llm, "llm_engine"):
        raise SpecError("llm", f"expected a midstream.LLM, got {kind(llm)}")
    own = llm.info.shape
    if (own.num_layers, own.hidden_size) != (shape.num_layers, shape.hidden_size):
        raise SpecError(
            "llm",
            f"this engine's model has {own.num_layers} layers of width {own.hidden_size}, and the "
            f"twin's {shape.num_layers} of width {shape.hidden_size}",
        )


def measure(llm: Any, job: SweepJob, metric: Metric) -> Sweep:
    """Carry out a sweep on a `midstream.LLM`: its unpatched runs, then all cells in one batch."""
    job.begin(_outputs(llm, metric, job.first_runs()))
    runs = list(job.runs())
    for run, output in zip(runs, _outputs(llm, metric, runs), strict=True):
        job.add(run, output)
    return job.result()


def compare(
    estimated: Sweep, measured: Sweep, indices: Iterable[tuple[int, ...]]
) -> AttributionCheck:
    cells = tuple(_cell(estimated, measured, index) for index in indices)
    return AttributionCheck(cells, measured, estimated)


def _outputs(llm: Any, metric: Metric, runs: Sequence[SweepRun]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    if not metric.reads_all:
        check_logprobs_mode(llm.llm_engine.vllm_config.model_config.logprobs_mode)
        params.logprob_token_ids = [int(token) for token in metric.tokens]
    plans = [run.plan for run in runs]
    outputs: list[Any] = llm.generate(
        [{"prompt_token_ids": list(run.token_ids)} for run in runs],
        params,
        capture=[None if plan is None else list(plan.captures) or None for plan in plans],
        edits=[None if plan is None else list(plan.edits) or None for plan in plans],
        use_tqdm=False,
    )
    return outputs


def _cell(estimated: Sweep, measured: Sweep, index: tuple[int, ...]) -> dict[str, Any]:
    names = zip(estimated.dims, index, strict=True)
    labels = {name: estimated.coords[name][place] for name, place in names}
    return {
        **labels,
        "token": estimated.tokens[index[estimated.dims.index("position")]],
        "estimate": float(estimated.values[index]),
        "measured": float(measured.values[index]),
    }


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
