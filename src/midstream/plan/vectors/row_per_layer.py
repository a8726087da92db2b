"""Readers of edits with one vector per layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from midstream.errors import SpecError
from midstream.plan.selection import Layers
from midstream.plan.vectors.matrix import is_matrix, read_rows
from midstream.plan.vectors.named_vector import Named, read_vector
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, is_int

_LAYER = re.compile(r"0|-?[1-9][0-9]{0,5}")


def is_by_layer(value: object) -> bool:
    """Return whether `value` is a dict of vectors by layer; in JSON, layers are `str`."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(is_int(key) or (isinstance(key, str) and _LAYER.fullmatch(key)) for key in value)
    )


def read_by_layer(
    field: str, value: Mapping[Any, Any], layer: object
) -> tuple[tuple[Vector, ...], list[int]]:
    """Read {layer: vector}; return the vectors and their layers. `layer` must be None."""
    if layer is not None:
        raise SpecError("layer", f"`{field}` is a dict by layer, which has the layers; omit it")
    rows: list[Vector] = []
    for key, vector in value.items():
        with at(f"{field}[{key}]"):
            rows.append(Vector.parse(vector))
            if rows[-1].size != rows[0].size:
                raise SpecError(
                    "", f"expected {rows[0].size} numbers, as at the first layer, got "
                    f"{rows[-1].size}"
                )  # fmt: skip
    return tuple(rows), [int(key) for key in value]


def read_per_layer(
    field: str, value: object, layer: object
) -> tuple[Vector | Named | tuple[Vector, ...], Any]:
    """Read one vector or name, or several vectors, one per layer; return also the layers."""
    if is_by_layer(value):
        assert isinstance(value, Mapping)
        rows, layer = read_by_layer(field, value, layer)
    elif is_matrix(value):
        with at(field):
            rows = read_rows(value)
    else:
        with at(field):
            return read_vector(value), layer
    return (rows[0] if len(rows) == 1 else rows), layer


def check_per_layer(field: str, count: int, layers: Layers) -> None:
    if layers.indices == "all":
        raise SpecError(
            "layer",
            f"`{field}` has {count} rows, one per layer, which need the layers listed, such as "
            f"layer=range({count})",
        )
    if len(layers.indices) != count:
        num_layers = len(layers.indices)
        where = f"{num_layers} layer" if num_layers == 1 else f"{num_layers} layers"
        raise SpecError(
            field,
            f"expected one vector [width], or one row per layer, got {count} rows for {where}; "
            f"give one row, or list {count} layers, such as layer=range({count})",
        )
