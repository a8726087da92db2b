"""JSON form of directions: how a server returns a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.fit.files import Loaded
from midstream.fit.scores import LayerScore
from midstream.spec.selection import read_site
from midstream.spec.vector import Vector
from midstream.validation import at, is_int, kind, read_fields, read_float32, read_int

if TYPE_CHECKING:
    from midstream.fit.direction_set import DirectionSet

FORMAT = "midstream.directions/1"
_FIELDS = ("format", "site", "method", "num_folds", "model_type", "best_layer", "layers")
_LAYER = ("layer", "vector", "midpoint", "gap", "score")
_SCORE = ("auc", "accuracy", "d_prime")


def to_json(found: DirectionSet) -> dict[str, Any]:
    """Return directions as JSON values: by layer the vector, the midpoint, the gap and the scores
    on held-out rows; null where there is none.
    """
    return {
        "format": FORMAT,
        "site": found.site,
        "method": found.method,
        "num_folds": found.num_folds,
        "model_type": found.model_type,
        "best_layer": found.best_layer if found.scores else None,
        "layers": [
            {
                "layer": one.layer,
                "vector": Vector.parse(one.vector).emit(),
                "midpoint": None if one.midpoint is None else Vector.parse(one.midpoint).emit(),
                "gap": one.gap,
                "score": one.score and {name: getattr(one.score, name) for name in _SCORE},
            }
            for one in found
        ],
    }


def from_json(value: object) -> Loaded:
    """Read what `to_json` made, as the fields of `Directions`."""
    given = read_fields(value, required=_FIELDS, optional=())
    if given["format"] != FORMAT:
        raise SpecError("format", f"expected {FORMAT!r}, got {given['format']!r}")
    parts: dict[int, dict[str, Any]] = {}
    for nth, each in enumerate(_list(given["layers"])):
        with at(f"layers[{nth}]"):
            part = _read_layer(each)
            if part["layer"] in parts:
                raise SpecError("layer", f"{part['layer']} is given twice")
            parts[part["layer"]] = part
    if not parts or list(parts) != sorted(parts):
        raise SpecError("layers", "expected at least one, ascending")
    if len({part["vector"].shape for part in parts.values()}) > 1:
        raise SpecError("layers", "expected vectors of one width")
    midpoints = [part["midpoint"] for part in parts.values()]
    has_midpoints = midpoints[0] is not None
    for nth, one in enumerate(midpoints):
        if (one is not None) != has_midpoints:
            raise SpecError(f"layers[{nth}].midpoint", "expected one at every layer, or at none")
    for name in ("method", "model_type"):
        if not isinstance(given[name], str):
            raise SpecError(name, f"expected `str`, got {kind(given[name])}")
    with at("num_folds"):
        num_folds = read_int(given["num_folds"])
    with at("site"):
        site = read_site(given["site"])
    return (
        np.stack([part["vector"] for part in parts.values()]),
        tuple(parts),
        site,
        np.stack(midpoints) if has_midpoints else None,
        {layer: part["score"] for layer, part in parts.items() if part["score"] is not None},
        given["method"],
        num_folds,
        given["model_type"],
    )


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SpecError("layers", f"expected a list, got {kind(value)}")
    return value


def _read_layer(value: object) -> dict[str, Any]:
    given = read_fields(value, required=_LAYER, optional=())
    if not is_int(given["layer"]) or given["layer"] < 0:
        raise SpecError("layer", f"expected an index from 0, got {kind(given['layer'])}")
    with at("vector"):
        vector = Vector.parse(given["vector"]).numpy()
    midpoint, score = given["midpoint"], None
    if midpoint is not None:
        with at("midpoint"):
            midpoint = Vector.parse(midpoint).numpy()
            if midpoint.shape != vector.shape:
                raise SpecError("", f"expected {len(vector)} numbers, got {len(midpoint)}")
    if given["score"] is not None:
        with at("score"):
            numbers: Mapping[str, Any] = read_fields(given["score"], required=_SCORE, optional=())
            score = LayerScore(*(float(read_float32(numbers[name])) for name in _SCORE))
    return {"layer": given["layer"], "vector": vector, "midpoint": midpoint, "score": score}
