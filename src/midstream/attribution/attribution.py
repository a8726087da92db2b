"""`Attribution`: estimates of a grid of patches, and their comparison with real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.spec.positions.prompt import Prompt
from midstream.spec.shape import ModelShape
from midstream.sweep import Recovered, Sweep, SweepRequest
from midstream.sweep.job import SweepPrompt

if TYPE_CHECKING:
    import xarray

    from midstream.attribution.check import AttributionCheck


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
        return self.sweep.values - np.float32(self.base)

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
        from midstream.attribution.check import check

        return check(self, llm, top)

    def to_xarray(self) -> xarray.DataArray:
        """Return the estimates as a labelled array; see `Sweep.to_xarray`."""
        return self.sweep.to_xarray()

    def __repr__(self) -> str:
        return repr(self.sweep).replace("Sweep(", "Attribution(", 1)

    def _repr_html_(self) -> str:
        return self.sweep._repr_html_()
