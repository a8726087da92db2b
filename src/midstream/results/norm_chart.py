"""Norms of vectors by layer and position, as a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.results.arrays import to_numpy
from midstream.sites import Tap, parse

if TYPE_CHECKING:
    from midstream.viz import Chart


def norm_chart(
    taps: Sequence[Tap],
    read: Callable[[Tap], tuple[Any, Any]],
    site: str | None,
    tokens: Any,
) -> Chart:
    """Draw log₁₀ of the norms of a site.

    Args:
        taps: the known ones.
        read: returns norms, or vectors, [rows, …] and positions, int64 [rows], of a tap.
        site, tokens: see `NormResults.picture`, whose errors are these.
    """
    sites = list(dict.fromkeys(name for name, _ in taps))
    if site is None and len(sites) == 1:
        site = sites[0]
    named = None if site is None else parse(site)
    layers = sorted(layer for name, layer in taps if named and name == named[0])
    if named is None or not layers:
        raise SpecError("site", f"expected one of {', '.join(sites)}, got {site!r}")
    from midstream.viz.heatmaps import heatmap, position_label

    values, positions = zip(*(read((named[0], layer)) for layer in layers), strict=True)
    places = positions[0].tolist()
    if any(other.tolist() != places for other in positions):
        raise SpecError("site", f"the layers of {named[0]} have norms at different positions")
    rows = np.stack([to_numpy(part).reshape(len(places), -1).astype(np.float64) for part in values])
    with np.errstate(divide="ignore"):
        logarithms = np.log10(np.linalg.norm(rows, axis=2))
    return heatmap(
        np.where(np.isfinite(logarithms), logarithms, np.nan),
        layers,
        [position_label(place, tokens) for place in places],
        title=f"norms at {named[0]}",
        row_title="layer",
        column_title="position",
        value_title="log₁₀ of the L2 norm",
        center=None,
    )


class NormPlots:
    """Plots of activations."""

    def picture(self: Any, site: str | None = None, tokens: Any = None) -> Chart:
        """Return the norms of the rows by layer and position; see `NormResults.picture`."""
        return norm_chart(
            self.keys(), lambda tap: (self[tap], self.positions_of(*tap)), site, tokens
        )

    def plot(self: Any, ax: Any = None, site: str | None = None, tokens: Any = None) -> Any:
        """Draw `picture(site, tokens)`; see `Chart.plot`."""
        return self.picture(site, tokens).plot(ax)
