"""Features of sparse autoencoders that were active in one completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from midstream.results.arrays import array_of, from_base64, to_base64, to_numpy
from midstream.results.readouts.base import NamedRows
from midstream.viz import Chart, heatmap
from midstream.viz.chart import Charted
from midstream.viz.heatmaps import position_label

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.features import Features
    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations

# Arrays of the JSON form, with the dtypes in it and here.
_ARRAYS = {
    "values": ("<f4", "float32"),
    "feature_values": ("<f4", "float32"),
    "ids": ("<i4", "int64"),
    "l0": ("<i4", "int64"),
}
# Features of a row that a picture shows.
_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows(Charted):
    """What a `Features` returned.

    Attributes:
        ids: int64 [rows, top], the most active features, the most active first; −1 where fewer are
            active.
        values: float32 [rows, top], their activations; 0 where fewer are active.
        features: the ids of the chosen features, in the given order.
        feature_values: float32 [rows, features], their activations.
        l0: int64 [rows], the number of active features.
        positions: int64 [rows], ascending.
        site, layer: where the vectors were read.
    """

    ids: Tensor
    values: Tensor
    features: tuple[int, ...]
    feature_values: Tensor
    l0: Tensor
    positions: Tensor
    site: str
    layer: int

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.positions)

    def __repr__(self) -> str:
        chosen = f" and {len(self.features)} features" if self.features else ""
        top = self.values.shape[1]
        return (
            f"FeatureRows({len(self)} positions at {self.site} of layer {self.layer}: "
            f"top {top}{chosen})"
        )

    def table(self, tokens: Any = None, top: int = _SHOWN) -> str:
        """Return a table as plain text: a line for each position, with its most active features and
        their activations.

        Args:
            tokens: texts of the tokens by position, of the prompt and the generated ones; None:
                positions alone are shown.
            top: number of features of each position.
        """
        lines = []
        for row, position in enumerate(self.positions.tolist()):
            word = [] if tokens is None else [repr(tokens[position])]
            pairs = zip(self.ids[row, :top].tolist(), self.values[row, :top].tolist(), strict=True)
            cells = [f"{feature} {value:.3g}" for feature, value in pairs if feature >= 0]
            lines.append([str(position), *word, *cells])
        widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def picture(self, tokens: Any = None, top: int = _SHOWN, rows: slice = slice(None)) -> Chart:
        """Return a picture: the chosen features, or the most active ones, by position, coloured by
        their activations. Of the most active ones, a cell is empty where the feature is not among
        the `top` of its position that the request asked for.

        Args:
            tokens: as for `table`.
            top: number of features that are shown, if none were chosen.
            rows: the rows to show.

        Raises:
            SpecError: there are too many cells: see `viz.heatmap`.
        """
        ids: Any = to_numpy(self.ids)[rows]
        values = to_numpy(self.values)[rows]
        shown, grid = list(self.features), to_numpy(self.feature_values)[rows].T
        if not shown:
            active = ids[ids >= 0]
            largest = {int(index): float(values[ids == index].max()) for index in np.unique(active)}
            shown = sorted(largest, key=lambda index: -largest[index])[:top]
            grid = np.full((len(shown), len(ids)), np.nan)
            for line, feature in zip(grid, shown, strict=True):
                place, rank = np.nonzero(ids == feature)
                line[place] = values[place, rank]
        places = self.positions[rows].tolist()
        cut = f": {len(places)} of {len(self)} positions" if len(places) < len(self) else ""
        return heatmap(
            grid,
            shown,
            [position_label(place, tokens) for place in places],
            title=f"features at {self.site} of layer {self.layer}{cut}",
            row_title="feature",
            column_title="position",
            value_title="activation",
            center=None,
            limits=(0, float(np.nanmax(grid))) if np.nansum(grid) > 0 else None,
            fmt=".3g",
        )

    @staticmethod
    def of(rows: Activations, capture: ResolvedCapture, asked: Features) -> FeatureRows:
        """Return the rows of an SAE, in memory of their own."""
        import torch

        pattern = capture.pattern
        assert pattern is not None
        (tap,) = capture.taps
        features = tuple(feature for feature, _ in pattern.keys)
        every = rows[tap].as_subclass(torch.Tensor)
        sizes = [asked.top, asked.top, len(features), 1]
        ids, values, chosen, number = every.split(sizes, -1)
        return FeatureRows(
            ids.contiguous().view(torch.int32).long(),
            values.clone(),
            features,
            chosen.clone(),
            number.contiguous().view(torch.int32).long()[:, 0],
            rows.positions_of(*tap).clone(),
            *pattern.reads[0],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        rows, top = self.values.shape
        return 4 * rows * (2 * top + len(self.features) + 1)

    def to_json(self) -> dict[str, Any]:
        """Return an object with `positions`, `site`, `layer`, `features`, `shape` of `values`, and
        as little-endian bytes in base64 `values` and `feature_values`, float32, and `ids` and
        `l0`, int32.
        """
        return {
            "positions": self.positions.tolist(),
            "site": self.site,
            "layer": self.layer,
            "features": list(self.features),
            "shape": list(self.values.shape),
            **{name: to_base64(getattr(self, name), sent) for name, (sent, _) in _ARRAYS.items()},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FeatureRows:
        """Read what `to_json` returned."""
        shape, features = tuple(value["shape"]), tuple(value["features"])
        shapes = {"l0": shape[:1], "feature_values": (*shape[:1], len(features))}
        arrays: dict[str, Any] = {}
        for name, (sent, kept) in _ARRAYS.items():
            arrays[name] = from_base64(value[name], shapes.get(name, shape), sent, kept)
        positions = array_of(value["positions"], "int64")
        where = {"site": value["site"], "layer": value["layer"]}
        return FeatureRows(**arrays, features=features, positions=positions, **where)


class FeatureResults(NamedRows[FeatureRows]):
    """What SAEs returned for one completion, by the names of the `Features`."""

    rows_field: ClassVar[str] = "feature_rows"
    about: ClassVar[str] = "Active features, by name."
    json_type: ClassVar[str] = "object"
    fewer: ClassVar[str] = "fewer positions, or a smaller `top`"
    unknown = "there are no features {}; there are {}"
    kind = FeatureRows
