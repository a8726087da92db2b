"""Edits with the rows of an earlier request, by reference, become edits with rows by value."""

from __future__ import annotations

import dataclasses
from typing import Any

from midstream.errors import SpecError
from midstream.plan.captured_rows import CapturedRows, OpenRows
from midstream.plan.heads import head_size
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.local import Edit, Local
from midstream.plan.operations.plain import PlainEdit
from midstream.plan.operations.replace import Replace
from midstream.plan.shape import ModelShape, VectorSize
from midstream.plan.vectors.named_lookup import find_taps, from_start
from midstream.validation import at


def has_captured(edit: Edit) -> bool:
    """Return whether an edit has rows of an earlier request."""
    inner = edit.edit if isinstance(edit, Gate) else edit
    return isinstance(inner, Replace) and isinstance(inner.rows, CapturedRows)


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
    if not isinstance(edit, Replace) or not isinstance(edit.rows, CapturedRows):
        return (edit,)
    rows = edit.rows
    with at("rows"):
        source = open_rows(rows.id)
    captured: dict[str, Any] = {rows.id: dict.fromkeys(source.taps)}
    taps = find_taps(captured, from_start(edit.layers, shape.num_layers), edit.sites, edit.left)
    assert taps is not None, "captured rows have taps"
    edits = []
    for tap in taps:
        with at("rows"):
            mine = source.read(tap, rows.positions)
        place: dict[str, Any] = {"site": tap[0], "layer": tap[1]}
        if edit.heads:
            place |= {"head": None, "dims": _columns(edit, shape.size(tap))}
        edits.append(edit.replace(rows=mine, **place))
    return tuple(edits)


def _columns(edit: Replace, size: VectorSize) -> list[int]:
    """Return the components of an edit's heads, which are those that it replaces."""
    if edit.norm is not None:
        raise SpecError("norm", "unsupported with captured rows of single heads")
    width = head_size(edit.heads, size)
    dims = edit.dims or range(width)
    if dims[-1] >= width:
        raise SpecError("dims", f"{dims[-1]} is out of range: a head has {width} numbers")
    return [head * width + dim for head in edit.heads for dim in dims]
