"""The edit of one cell: what it writes over the vectors of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.sweep.cells import SweepCell
from midstream.lab.sweep.feature_patch import FeaturePatch
from midstream.lab.sweep.request import SweepRequest
from midstream.lab.sweep.source import NumberSource
from midstream.plan import Edit, Replace, Scale
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.vector import Vector
from midstream.sites import Tap, show_tap


@dataclass(frozen=True)
class PatchRows:
    """What positions are patched with."""

    by_tap: Mapping[Tap, NDArray[np.float32]]  # [rows, width]
    places: Mapping[Tap, Mapping[int, int]] | None  # row of each source position; None: one
    aligned: Mapping[int, int]  # source position of each position of the prompt

    def of(self, tap: Tap, positions: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the rows of some positions, [positions, width], or one row for all of them."""
        rows = self.by_tap[tap]
        if self.places is None:
            return rows
        return rows[[self.places[tap][self.aligned[position]] for position in positions]]


def edits_of(
    cell: SweepCell,
    request: SweepRequest,
    rows: PatchRows | None,
    shape: ModelShape,
    features: FeaturePatch | None = None,
) -> list[Edit]:
    """Return the edits of a cell, which count once for each of its positions; no rows: zeros."""
    if features is not None:
        assert cell.feature is not None
        values = [request.source.value if isinstance(request.source, NumberSource) else 0.0]
        if rows is not None:
            values = features.activations(cell.feature, rows.of(cell.tap, cell.positions))
        feature_edits = features.edits(
            cell.feature, cell.tap, values, request.alpha, cell.positions
        )
        return list(feature_edits)
    site, layer = cell.tap
    place: dict[str, Any] = {"site": site, "layer": layer, "positions": list(cell.positions)}
    if cell.head is not None:
        place["head"] = cell.head
    if request.weights is None:
        if request.dims:
            place["dims"] = request.dims
        if rows is None:
            return [Scale(1.0 - request.alpha, **place)]
        vectors = _of_head(rows.of(cell.tap, cell.positions), cell, shape)
        return [Replace(vectors, alpha=request.alpha, **place)]
    share = request.alpha * request.weights.numpy().astype(np.float64)
    factor = Vector.parse(1.0 - share)
    if rows is None:
        return [Scale(factor, **place)]
    vectors = _of_head(rows.of(cell.tap, cell.positions), cell, shape)
    if len(vectors) == 1:
        return [Scale(factor, shift=share * vectors[0], **place)]
    # An edit has one shift for all of its positions.
    return [
        Scale(factor, shift=share * row, **{**place, "positions": position})
        for position, row in zip(cell.positions, vectors, strict=True)
    ]


def check_sizes(request: SweepRequest, taps: frozenset[Tap], shape: ModelShape) -> None:
    for tap in sorted(taps):
        width = shape.width(tap)
        if request.heads is not None:
            width //= shape.num_heads(tap)
        if request.mask_size not in (None, width):
            raise SpecError(
                "mask",
                f"expected {width} truth values, as the vectors of {show_tap(tap)} have numbers, "
                f"got {request.mask_size}",
            )
        if request.dims and request.dims[-1] >= width:
            raise SpecError(
                "mask",
                f"{request.dims[-1]} is out of range: the vectors of {show_tap(tap)} have {width} "
                "numbers",
            )
        if request.weights is not None and request.weights.size != width:
            raise SpecError(
                "mask",
                f"expected {width} weights, as the vectors of {show_tap(tap)} have numbers, got "
                f"{request.weights.size}; indices of components are integers",
            )


def check_rows(rows: Mapping[Tap, NDArray[np.float32]], shape: ModelShape) -> None:
    """Check that rows are as wide as the vectors of their taps."""
    for tap, tap_rows in rows.items():
        if tap in shape.taps and tap_rows.shape[1] != shape.width(tap):
            raise SpecError(
                "source",
                f"expected rows of {shape.width(tap)} numbers at {show_tap(tap)}, got "
                f"{tap_rows.shape[1]}",
            )


def _of_head(rows: NDArray[np.float32], cell: SweepCell, shape: ModelShape) -> NDArray[np.float32]:
    if cell.head is None:
        return rows
    size = rows.shape[1] // shape.num_heads(cell.tap)
    return rows[:, cell.head * size : (cell.head + 1) * size]
