"""`Attribution`: estimates of a grid of patches, and their comparison with real ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.attribution.check import AttributionCheck, check_same_model, compare, measure
from midstream.lab.sweep import Metric, Recovered, Sweep, SweepRequest
from midstream.lab.sweep.job import SweepContext, SweepJob, SweepPrompt
from midstream.plan.positions.prompt import Prompt
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import check_tapped
from midstream.validation import at, read_int

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True, eq=False)
class Attribution:
    """The estimated metric of each cell of a grid of patches.

    Attributes:
        sweep: the estimates in the form of a sweep: `values` are the metric that a patch of the
            cell would have, `corrupt` and `clean` those of the unpatched runs of the twin.
        request: the cells and the metric; tokens are ids.
        shape: dimensions of the twin.
        prompt: the corrupt prompt.
        source: the clean prompt.
    """

    sweep: Sweep
    request: SweepRequest
    shape: ModelShape
    prompt: SweepPrompt
    source: Prompt

    @property
    def values(self) -> NDArray[np.float32]:
        """The estimates; see `Sweep.values`."""
        return self.sweep.values

    @property
    def effects(self) -> NDArray[np.float32]:
        """The estimated change of the metric by each patch: (clean − corrupt) · gradient."""
        effects: NDArray[np.float32] = self.sweep.values - np.float32(self.base)
        return effects

    @property
    def base(self) -> float:
        """The value of a patch without an effect."""
        return 0.0 if isinstance(self.sweep.metric, Recovered) else self.sweep.corrupt

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dimensions; see `Sweep.dims`."""
        return self.sweep.dims

    @property
    def coords(self) -> Any:
        """Labels of the dimensions; see `Sweep.coords`."""
        return self.sweep.coords

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """Return the cells with the largest effects, in either direction.

        Returns:
            The cells in descending order: a dict with the label of each dimension, `token`,
            `value`, and `effect`, its difference from the unpatched run.
        """
        return [{**cell, "effect": cell["value"] - self.base} for cell in self.sweep.best(k)]

    def check(self, llm: Any, top: int = 20) -> AttributionCheck:
        """Patch the cells with the largest estimates in an engine, in one batch.

        Args:
            llm: a `midstream.LLM` on the same model, which taps the sites of these cells.
            top: number of cells.

        Raises:
            SpecError: `top` is malformed, the engine does not tap a site, or the metric is a
                function of logits.
            ReceiptError: results differ from their plan.
        """
        with at("top"):
            count = read_int(top)
            if count < 1:
                raise SpecError("", f"expected at least 1 cell, got {count}")
        check_same_model(llm, self.shape)
        metric, shown = self.request.metric, self.sweep.metric
        if not isinstance(metric, Metric) or not isinstance(shown, Metric):
            raise SpecError(
                "metric",
                "a function of logits cannot be measured in an engine, which gives the "
                "log-probabilities of tokens; use LogProb, LogitDiff, KL or Recovered",
            )
        self.request.check_readable(llm.info.shape)
        # The twin's shape, so that the grid is that of the estimates whatever the engine taps.
        context = SweepContext(self.shape, llm.vectors.lookup)
        source = SweepPrompt(self.source, ())
        job = SweepJob(self.request, context, self.prompt, source, shown)
        effects = np.abs(self.effects)
        cells = sorted(job.grid.cells, key=lambda cell: -effects[cell.index])[:count]
        for cell in cells:
            check_tapped(cell.tap, llm.info.shape, "sites", "layers")
        chosen = frozenset(cell.index for cell in cells)
        kept = tuple(cell for cell in job.grid.cells if cell.index in chosen)
        job.grid = replace(job.grid, cells=kept)
        measured = measure(llm, job, metric)
        return compare(self.sweep, measured, [cell.index for cell in cells])

    def to_xarray(self) -> xarray.DataArray:
        """Return the estimates as a labelled array; see `Sweep.to_xarray`."""
        return self.sweep.to_xarray()

    def __repr__(self) -> str:
        return repr(self.sweep).replace("Sweep(", "Attribution(", 1)

    def plot(self, ax: Any = None) -> Any:
        """Draw the estimates as heatmaps; see `Chart.plot`."""
        return self.sweep.plot(ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return self.sweep._repr_mimebundle_()
