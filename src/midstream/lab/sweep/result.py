"""`Sweep`: the metric of each cell of a grid, with labels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.sweep.metrics import Metric, Recovered, read_metric
from midstream.lab.sweep.receipts import SweepReceipts
from midstream.validation import at, check_regular, check_suffix, read_fields, read_json
from midstream.viz import Chart, heatmap
from midstream.viz.chart import Charted

if TYPE_CHECKING:
    import pandas
    import xarray

FORMAT = "midstream.sweep/1"
# Heatmaps that are drawn; a sweep of many heads at many positions has more.
_MOST_PANELS = 12
_FIELDS = (
    "format", "values", "dims", "coords", "metric", "clean", "corrupt", "noise_floor", "tokens",
    "receipts", "cached_tokens", "prompt_tokens",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sweep(Charted):
    """The metric of each cell of a grid of patches.

    A cell that could not be patched is nan: its position has no source position, or its layer lacks
    the site.

    Attributes:
        values: float32, one dimension for each of `dims`.
        dims: names of the dimensions: "site", "layer", "position", and "head" with heads or
            "feature" with features.
        coords: labels of each dimension: names of sites, layers, positions or names of groups,
            heads, ids of features.
        metric: the metric; the name of the function, if it was one.
        corrupt: the metric of the prompt without a patch. With `Recovered` this and `clean` are
            values of the metric inside it; those of `Recovered` itself are 0 and 1.
        clean: the metric of the source prompt; None: the source is no prompt.
        noise_floor: the largest difference between unpatched runs of the prompt, which were among
            the cells, in units of `values`. Smaller differences between cells mean nothing. nan: a
            sweep without `repeats`.
        tokens: text of each position, or of the positions of each group.
        receipts: what the device counted, of every run.
    """

    values: NDArray[np.float32]
    dims: tuple[str, ...]
    coords: Mapping[str, list[Any]]
    metric: Metric | str
    corrupt: float
    clean: float | None
    noise_floor: float
    tokens: tuple[str, ...]
    receipts: SweepReceipts = field(default_factory=SweepReceipts)

    def __post_init__(self) -> None:
        shape = tuple(len(self.coords[name]) for name in self.dims)
        if self.values.shape != shape:
            raise SpecError("values", f"expected shape {shape}, got {self.values.shape}")

    def best(self, k: int = 10) -> list[dict[str, Any]]:
        """Return the cells that differ most from the unpatched run.

        Args:
            k: number of cells.

        Returns:
            The cells in descending order of that difference: a dict with the label of each
            dimension, `token` and `value`.
        """
        base = 0.0 if isinstance(self.metric, Recovered) else self.corrupt
        away = np.abs(self.values.astype(np.float64) - base).ravel()
        order = np.argsort(np.where(np.isnan(away), np.inf, -away), kind="stable")
        known = int((~np.isnan(away)).sum())
        return [self._cell(int(flat)) for flat in order[: min(k, known)]]

    def to_xarray(self) -> xarray.DataArray:
        """Return a labelled array; its `attrs` are the numbers of the unpatched runs.

        Raises:
            MissingExtraError: xarray is not installed.
        """
        MissingExtraError.require("xarray", "Sweep.to_xarray")
        import xarray

        coords: dict[str, Any] = {name: list(self.coords[name]) for name in self.dims}
        coords["token"] = ("position", list(self.tokens))
        attrs = {"metric": str(self._metric_json()), "corrupt": self.corrupt, "clean": self.clean,
                 "noise_floor": self.noise_floor}  # fmt: skip
        return xarray.DataArray(self.values, coords=coords, dims=self.dims, attrs=attrs)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with one row for each cell: its labels, `token` and `value`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        MissingExtraError.require("pandas", "Sweep.to_pandas")
        import pandas

        return pandas.DataFrame([self._cell(flat) for flat in range(self.values.size)])

    def picture(self) -> Chart:
        """Return heatmaps, one for each site and head, with the same colours: what a notebook
        shows. Of more than 12 the first 12 are drawn, and the title says so.

        Raises:
            SpecError: there are too many cells: see `viz.heatmap`.
        """
        charts = self._charts()
        left = len(charts) - _MOST_PANELS
        rest = f"; {left} of {len(charts)} heatmaps are not drawn, see Sweep.values"
        return Chart.beside(f"{self!r}{rest if left > 0 else ''}", charts[:_MOST_PANELS])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, which `from_json` reads; nan is null."""
        return {
            "format": FORMAT,
            "values": _lists(self.values),
            "dims": list(self.dims),
            "coords": {name: list(self.coords[name]) for name in self.dims},
            "metric": self._metric_json(),
            "clean": None if self.clean is None else number_to_json(self.clean),
            "corrupt": number_to_json(self.corrupt),
            "noise_floor": number_to_json(self.noise_floor),
            "tokens": list(self.tokens),
            "receipts": self.receipts.to_json(),
            "prompt_tokens": self.receipts.prompt_tokens,
            "cached_tokens": self.receipts.cached_tokens,
        }

    @staticmethod
    def from_json(value: object) -> Sweep:
        """Read what `to_json` returned; SpecError: it is not that."""
        fields = read_fields(value, required=_FIELDS)
        if fields["format"] != FORMAT:
            raise SpecError("format", f"expected {FORMAT!r}, got {str(fields['format'])[:60]!r}")
        metric = fields["metric"]
        is_function = isinstance(metric, Mapping) and set(metric) == {"function"}
        with at("metric"):
            parsed_metric = str(metric["function"]) if is_function else read_metric(metric)
        try:
            values = np.array(fields["values"], dtype=np.float64)  # null becomes nan
            return Sweep(
                values.astype(np.float32),
                tuple(fields["dims"]),
                {name: list(fields["coords"][name]) for name in fields["dims"]},
                parsed_metric,
                _number(fields["corrupt"]),
                None if fields["clean"] is None else float(fields["clean"]),
                _number(fields["noise_floor"]),
                tuple(fields["tokens"]),
                SweepReceipts.from_json(
                    fields["receipts"], int(fields["prompt_tokens"]), int(fields["cached_tokens"])
                ),
            )
        except SpecError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError("", f"this is no sweep: {error}") from None

    def save(self, path: str | Path) -> Path:
        """Write a JSON file, whose name ends in `.json`, and return its path."""
        target = Path(check_suffix(path, ".json"))
        target.write_text(json.dumps(self.to_json(), allow_nan=False), encoding="utf-8")
        return target

    @staticmethod
    def load(path: str | Path) -> Sweep:
        """Read a file that `save` wrote.

        Raises:
            SpecError: it is not such a file.
            OSError: it cannot be read.
        """
        check_regular(path)
        return Sweep.from_json(read_json(Path(path).read_bytes()))

    def _charts(self) -> list[Chart]:
        """Return the two-dimensional slices of the grid. Rows are layers; columns are positions, or
        heads or features if there is one position.
        """
        column = "position"
        if len(self.dims) > 3 and len(self.coords["position"]) == 1:
            column = self.dims[3]
        others = [name for name in self.dims if name not in ("layer", column)]
        center, most = self._scale()
        charts = []
        for index in np.ndindex(*(len(self.coords[name]) for name in others)):
            where = dict(zip(others, index, strict=True))
            key = tuple(where.get(name, slice(None)) for name in self.dims)
            told = [
                self._title(name, place)
                for name, place in where.items()
                if name == "site" or len(self.coords[name]) > 1
            ]
            chart = heatmap(
                self.values[key],
                self.labels("layer"),
                self.labels(column),
                title=", ".join(told),
                row_title="layer",
                column_title=column,
                value_title=self.title,
                unit=self._unit,
                center=center,
                limits=(center - most, center + most),
            )
            charts.append(chart)
        return charts

    @property
    def _unit(self) -> str:
        if isinstance(self.metric, str):
            return ""
        return "share" if isinstance(self.metric, Recovered) else "nats"

    def _scale(self) -> tuple[float, float]:
        """Return the value of no effect, and the largest difference from it, for colours."""
        is_known = not isinstance(self.metric, Recovered) and math.isfinite(self.corrupt)
        base = self.corrupt if is_known else 0.0
        away = np.abs(self.values - base)
        most = 0.0 if np.isnan(away).all() else float(np.nanmax(away))
        return base, most or 1.0

    def labels(self, name: str) -> list[str]:
        """Return the labels of a dimension as they are shown; of positions with their tokens."""
        if name != "position":
            return [str(coord) for coord in self.coords[name]]
        pairs = zip(self.coords[name], self.tokens, strict=True)
        return [coord if isinstance(coord, str) else f"{coord} {text!r}" for coord, text in pairs]

    def __repr__(self) -> str:
        counts = [(len(self.coords[name]), name) for name in self.dims]
        shape = " × ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
        clean = "" if self.clean is None else f", clean {self.clean:.4g}"
        return (
            f"Sweep({shape}; {self.title}; corrupt {self.corrupt:.4g}{clean}, "
            f"noise floor {self.noise_floor:.2g})"
        )

    def __str__(self) -> str:
        try:
            return f"{self!r}\n{self.picture().text}"
        except SpecError:  # too many cells
            return repr(self)

    @property
    def title(self) -> str:
        """The metric, for a heading."""
        return self.metric if isinstance(self.metric, str) else show_metric(self.metric)

    def _title(self, name: str, index: int) -> str:
        label = self.labels(name)[index]
        return label if name == "site" else f"{name} {label}"

    def _metric_json(self) -> object:
        return {"function": self.metric} if isinstance(self.metric, str) else self.metric.emit()

    def _cell(self, flat: int) -> dict[str, Any]:
        index = np.unravel_index(flat, self.values.shape)
        cell = {
            name: self.coords[name][place] for name, place in zip(self.dims, index, strict=True)
        }
        token = self.tokens[index[self.dims.index("position")]]
        return {**cell, "token": token, "value": float(self.values[index])}


def show_metric(metric: Metric) -> str:
    """Return a metric for headings, as it is written in Python."""
    if isinstance(metric, Recovered):
        return f"Recovered({show_metric(metric.metric)})"
    return f"{type(metric).__name__}({', '.join(map(repr, metric.tokens))})"


def number_to_json(value: float) -> float | str | None:
    """Return a number as JSON: nan is null, and infinities have JavaScript's names."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _lists(values: NDArray[np.float32]) -> Any:
    """Return nested lists, with None for nan."""
    if values.ndim == 0:
        return number_to_json(float(values))
    return [_lists(row) for row in values]
