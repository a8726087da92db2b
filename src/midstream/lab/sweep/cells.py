"""The cells of a sweep: a grid of sites, layers, positions, and heads or features in one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from midstream.errors import SpecError
from midstream.lab.sweep.request import SweepRequest
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.select import PromptSelections, in_listed_order
from midstream.plan.selection import Sites
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_layer, find_taps
from midstream.sites import Tap
from midstream.validation import at

# Far above practical use: a sweep of all heads of a large model at each token of a paragraph.
MAX_CELLS = 1 << 20
# Positions of all groups of a sweep.
MAX_GROUPED = 1 << 16


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One patch."""

    index: tuple[int, ...]  # of its value in the grid
    tap: Tap
    positions: tuple[int, ...]
    head: int | None = None  # None: all of them
    feature: int | None = None  # of the request's SAE; None: the vector is patched


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep, in the order in which they run: those whose first position is last come
    first. A run shares the KV cache of the unpatched prompt before its first patched position, and
    the cache drops first what was used longest ago.
    """

    dims: tuple[str, ...]
    coords: Mapping[str, list[Any]]
    places: tuple[tuple[int, ...], ...]  # patched positions of each label of "position"
    cells: tuple[SweepCell, ...]  # those that can be patched

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.coords[name]) for name in self.dims)


def plan_grid(
    request: SweepRequest,
    shape: ModelShape,
    prompt: Prompt,
    has_source: Mapping[int, int] | None,
    rows: Mapping[Tap, frozenset[int]] | None = None,
    most: int = MAX_CELLS,
) -> Grid:
    """Return the cells of a sweep of one prompt.

    `has_source`: source position of each position that has one; None: all have. `rows`: source
    positions with a row, by (site, layer); None: all.
    """
    taps = frozenset(find_taps(request.layers, Sites(request.sites), shape, "layers", "sites"))
    layers = _layers(request, shape, taps)
    labels, places = _places(request, prompt)
    # The name of the last dimension, and its labels; None: there is none.
    last = "head" if request.sae is None else "feature"
    within = _heads(request, shape, taps) if request.sae is None else request.features
    dims = ("site", "layer", "position") + (() if within is None else (last,))
    coords: dict[str, list[Any]] = {
        "site": list(request.sites),
        "layer": layers,
        "position": labels,
    }
    if within is not None:
        coords[last] = list(within)
    count = len(request.sites) * len(layers) * len(places) * len(within or (0,))
    if count > most:
        raise SpecError(
            "",
            f"the grid has {count} cells, more than the limit of {most}; choose layers, positions, "
            "heads or features",
        )
    patched = count // max(1, len(places)) * sum(map(len, places))
    if patched > MAX_CELLS:
        raise SpecError(
            "groups",
            f"the cells patch {patched} positions, and the budget is {MAX_CELLS}; choose fewer "
            "groups, or fewer positions in them",
        )
    columns: Sequence[int | None] = (None,) if within is None else within
    cells = []
    for (site_index, site), (row, layer), (column, positions), (depth, part) in product(
        enumerate(request.sites), enumerate(layers), enumerate(places), enumerate(columns)
    ):
        tap = (site, layer)
        if tap in taps and _is_given(positions, tap, has_source, rows):
            index = (site_index, row, column) + (() if part is None else (depth,))
            cells.append(SweepCell(index, tap, positions, **({} if part is None else {last: part})))
    if not cells:
        raise SpecError(
            "align" if rows is None else "source",
            "no selected position has a position of the source, so there is nothing to patch",
        )
    cells.sort(key=lambda cell: -cell.positions[0])
    return Grid(dims, coords, tuple(places), tuple(cells))


def _layers(request: SweepRequest, shape: ModelShape, taps: frozenset[Tap]) -> list[int]:
    """Return the layers of a grid, as they are listed."""
    if request.layers.indices == "all":
        return sorted({layer for _, layer in taps})
    return [find_layer(layer, shape) for layer in request.layers.indices]


def _is_given(
    positions: tuple[int, ...],
    tap: Tap,
    has_source: Mapping[int, int] | None,
    rows: Mapping[Tap, frozenset[int]] | None,
) -> bool:
    if has_source is None:
        return rows is None or tap in rows
    if any(position not in has_source for position in positions):
        return False
    if rows is None:
        return True
    return all(has_source[position] in rows.get(tap, ()) for position in positions)


def _places(request: SweepRequest, prompt: Prompt) -> tuple[list[int | str], list[tuple[int, ...]]]:
    """Return the labels of the dimension "position", and the positions of each."""
    selections = PromptSelections(prompt, 1)
    if not request.groups:
        selected = _positions_of(request.positions, selections)
        if len(request.positions.include) > 1:
            # As they are listed; what several items select is there once.
            listed = in_listed_order(request.positions, prompt, 1, MAX_CELLS)
            selected = tuple(
                position for position in dict.fromkeys(listed) if position in set(selected)
            )
        return list(selected), [(position,) for position in selected]
    labels: list[int | str] = []
    places = []
    count = 0
    for name, positions in request.groups:
        try:
            selected = _positions_of(positions, selections)
        except SpecError as error:
            rest = error.path.removeprefix("positions")
            raise type(error)(f"groups.{name}{rest}", error.problem) from None
        labels.append(name)
        places.append(selected)
        count += len(selected)
        if count > MAX_GROUPED:
            raise SpecError(
                f"groups.{name}",
                f"with it the groups have {count} positions, and the budget is {MAX_GROUPED}; "
                "choose fewer groups, or fewer positions in them",
            )
    return labels, places


def _positions_of(positions: Positions, selections: PromptSelections) -> tuple[int, ...]:
    where, length = selections.select(positions), selections.prompt.length
    return tuple(
        position for start, stop in where.final(length, ()) for position in range(start, stop)
    )


def _heads(
    request: SweepRequest, shape: ModelShape, taps: frozenset[Tap]
) -> tuple[int, ...] | None:
    if request.heads is None:
        return None
    with at("heads"):
        counts = {site: shape.num_heads((site, layer)) for site, layer in sorted(taps)}
        for site, count in counts.items():
            if not count:
                raise SpecError(
                    "", f"the vectors of {site} are not of heads; use the sites q, k, v or z"
                )
        if request.heads == "all":
            if len(set(counts.values())) > 1:
                shown = ", ".join(f"{count} at {site}" for site, count in counts.items())
                raise SpecError("", f"the sites differ in heads, {shown}; sweep each by itself")
            return tuple(range(next(iter(counts.values()))))
        for site, count in counts.items():
            if max(request.heads) >= count:
                raise SpecError(
                    "",
                    f"head {max(request.heads)} is out of range: there are {count} heads in the "
                    f"vectors of {site}",
                )
        return request.heads
