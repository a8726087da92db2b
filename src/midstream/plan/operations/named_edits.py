"""Expansion of edits with registered names, or rows of earlier requests, to edits by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from midstream.errors import SpecError
from midstream.plan.captured_rows import CapturedRows, EarlierRows, OpenRows, no_rows
from midstream.plan.heads import head_size
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.local import Edit, Local
from midstream.plan.operations.plain import PlainEdit
from midstream.plan.operations.replace import Replace
from midstream.plan.operations.steer import Steer
from midstream.plan.positions.positions import Positions
from midstream.plan.selection import Sites
from midstream.plan.shape import ModelShape, VectorSize
from midstream.plan.vectors.named_lookup import (
    Lookup,
    NamedEdits,
    find_taps,
    from_start,
    index_from_start,
)
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, listed

E = TypeVar("E", bound=Edit)


def expand_edits(
    edits: Sequence[Edit], known: Sequence[int], expand: Callable[[Edit], tuple[Edit, ...]]
) -> tuple[tuple[Edit, ...], tuple[int, ...]]:
    """Return what each edit becomes, and each one's index before this and an earlier expansion."""
    expanded: list[Edit] = []
    origins: list[int] = []
    for index, edit in enumerate(edits):
        with at(f"edits[{index}]"):
            expanded.extend(expand(edit))
        origins += [known[index] if known else index] * (len(expanded) - len(origins))
    return tuple(expanded), tuple(origins)


def bind_edit(edit: Edit, lookup: Lookup, num_layers: int | None = None) -> tuple[Edit, ...]:
    """Return the edits of an edit, with names replaced by what is registered. A Steer's scale
    multiplies those of all Steers in a name's whole edits; others do not scale.
    """
    if isinstance(edit, Steer) and isinstance(edit.vector, Named):
        registered = lookup(edit.vector.name)
        if isinstance(registered, NamedEdits):
            _check_bare(edit, edit.vector.name)
            return _scaled_edits(edit.vector, edit.scale, registered)
    return edit.bind(lookup, num_layers)


def _check_bare(edit: Steer, name: str) -> None:
    """Check that a Steer for whole edits has nothing but a scale."""
    problems = {
        "layer": "layer" not in edit.left,
        "site": "site" not in edit.left,
        "norm": edit.norm is not None,
        "phase": edit.positions.phase != "all",
        "positions": edit.positions != Positions("all"),
    }
    for field, is_given in problems.items():
        if is_given:
            raise SpecError(
                field,
                f"must be omitted: `{name}` is registered with whole edits, which have their own",
            )


def _scaled_edits(named: Named, scale: float, named_edits: NamedEdits) -> tuple[Edit, ...]:
    factor = named.scale * scale
    if factor == 0.0:
        for edit in named_edits.edits:
            if not isinstance(edit.edit if isinstance(edit, Gate) else edit, Steer):
                raise SpecError(
                    "scale",
                    f"0 would leave the {edit.op} of `{named.name}`, which does not scale; omit "
                    "the name to apply none of its edits",
                )
    return tuple(_scaled_edit(edit, factor) for edit in named_edits.edits)


def _scaled_edit(edit: E, factor: float) -> E:
    if isinstance(edit, Gate):
        return dataclasses.replace(edit, edit=_scaled_edit(edit.edit, factor))
    if isinstance(edit, Steer) and factor != 1.0:
        return edit.replace(scale=edit.scale * factor)
    return edit


def has_captured(edit: Edit) -> bool:
    """Return whether an edit has rows of an earlier request."""
    return _captured_of(edit.edit if isinstance(edit, Gate) else edit) is not None


def _captured_of(edit: Edit) -> CapturedRows | None:
    rows = edit.rows if isinstance(edit, (Replace, Steer)) else None
    return rows if isinstance(rows, CapturedRows) else None


def fill_edit(edit: Edit, open_rows: OpenRows, shape: ModelShape) -> tuple[Edit, ...]:
    """Return an edit with the rows that it refers to: one per site and layer; or itself."""
    if isinstance(edit, Gate):
        with at("edit"):
            inner = _fill(edit.edit, open_rows, shape)
        return tuple(dataclasses.replace(edit, edit=part) for part in inner)
    if isinstance(edit, Local):
        return (edit,)
    return _fill(edit, open_rows, shape)


def _fill(edit: PlainEdit, open_rows: OpenRows, shape: ModelShape) -> tuple[PlainEdit, ...]:
    rows = _captured_of(edit)
    if rows is None or not isinstance(edit, (Replace, Steer)):
        return (edit,)
    with at("rows"):
        source = open_rows(rows.id)
    if rows.layer is not None:
        with at("rows"):
            return (edit.replace(rows=_of_layer(rows, source, edit.sites, shape)),)
    captured: dict[str, Any] = {rows.id: dict.fromkeys(source.taps)}
    taps = find_taps(captured, from_start(edit.layers, shape.num_layers), edit.sites, edit.left)
    assert taps is not None, "captured rows have taps"
    edits = []
    for tap in taps:
        with at("rows"):
            mine = source.read(tap, rows.positions)
        place: dict[str, Any] = {"site": tap[0], "layer": tap[1]}
        if edit.heads:
            if isinstance(edit, Steer):
                raise SpecError("head", "unsupported with captured rows, which are of all heads")
            place |= {"head": None, "dims": _columns(edit, shape.size(tap))}
        edits.append(edit.replace(rows=mine, **place))
    return tuple(edits)


def _of_layer(
    rows: CapturedRows, source: EarlierRows, sites: Sites, shape: ModelShape
) -> tuple[Vector, ...]:
    """Return the rows of the layer that is named, whatever layers the edit has."""
    assert rows.layer is not None
    if rows.site is None and len(sites) > 1:
        raise SpecError("site", f"missing: the edit has {listed(sites)}; say which the rows are of")
    layer = index_from_start(rows.layer, shape.num_layers)
    tap = (rows.site or sites.names[0], layer)
    if tap not in source.taps:
        raise no_rows(tap, source.taps)
    return source.read(tap, rows.positions)


def _columns(edit: Replace, size: VectorSize) -> list[int]:
    if edit.norm is not None:
        raise SpecError("norm", "unsupported with captured rows of single heads")
    width = head_size(edit.heads, size)
    dims = edit.dims or range(width)
    if dims[-1] >= width:
        raise SpecError("dims", f"{dims[-1]} is out of range: a head has {width} numbers")
    return [head * width + dim for head in edit.heads for dim in dims]
