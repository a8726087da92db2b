"""JSON form of directions: how a server returns a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.files import Loaded
from midstream.lab.fit.scores import ERRORS, SCORES, LayerScore
from midstream.plan.selection import read_site
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, is_int, kind, read_fields, read_float32, read_int

if TYPE_CHECKING:
    from midstream.lab.fit.direction_set import DirectionSet

FORMAT = "midstream.directions/1"
_FIELDS = ("format", "site", "method", "num_folds", "model_type", "best_layer", "layers")
_LAYER = ("layer", "vector", "midpoint", "gap", "score")


def to_json(directions: DirectionSet) -> dict[str, Any]:
    """Return directions as JSON values by layer; null where there is no midpoint or score."""
    return {
        "format": FORMAT,
        "site": directions.site,
        "method": directions.method,
        "num_folds": directions.num_folds,
        "model_type": directions.model_type,
        "best_layer": directions.best_layer if directions.scores else None,
        "layers": [
            {
                "layer": direction.layer,
                "vector": Vector.parse(direction.vector).emit(),
                "midpoint": None
                if direction.midpoint is None
                else Vector.parse(direction.midpoint).emit(),
                "gap": direction.gap,
                "score": direction.score
                and {name: getattr(direction.score, name) for name in (*SCORES, *ERRORS)},
            }
            for direction in directions
        ],
    }


def from_json(value: object) -> Loaded:
    """Read what `to_json` made, as the fields of `Directions`."""
    fields = read_fields(value, required=_FIELDS, optional=())
    if fields["format"] != FORMAT:
        raise SpecError("format", f"expected {FORMAT!r}, got {fields['format']!r}")
    parts: dict[int, dict[str, Any]] = {}
    for index, layer_json in enumerate(_list(fields["layers"])):
        with at(f"layers[{index}]"):
            part = _read_layer(layer_json)
            if part["layer"] in parts:
                raise SpecError("layer", f"{part['layer']} is given twice")
            parts[part["layer"]] = part
    if not parts or list(parts) != sorted(parts):
        raise SpecError("layers", "expected at least one, ascending")
    if len({part["vector"].shape for part in parts.values()}) > 1:
        raise SpecError("layers", "expected vectors of one width")
    midpoints = [part["midpoint"] for part in parts.values()]
    has_midpoints = midpoints[0] is not None
    for index, midpoint in enumerate(midpoints):
        if (midpoint is not None) != has_midpoints:
            raise SpecError(f"layers[{index}].midpoint", "expected one at every layer, or at none")
    for name in ("method", "model_type"):
        if not isinstance(fields[name], str):
            raise SpecError(name, f"expected `str`, got {kind(fields[name])}")
    with at("num_folds"):
        num_folds = read_int(fields["num_folds"])
    with at("site"):
        site = read_site(fields["site"])
    return (
        np.stack([part["vector"] for part in parts.values()]),
        tuple(parts),
        site,
        np.stack(midpoints) if has_midpoints else None,
        {layer: part["score"] for layer, part in parts.items() if part["score"] is not None},
        fields["method"],
        num_folds,
        fields["model_type"],
    )


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SpecError("layers", f"expected a list, got {kind(value)}")
    return value


def _read_layer(value: object) -> dict[str, Any]:
    fields = read_fields(value, required=_LAYER, optional=())
    if not is_int(fields["layer"]) or fields["layer"] < 0:
        raise SpecError("layer", f"expected an index from 0, got {kind(fields['layer'])}")
    with at("vector"):
        vector = Vector.parse(fields["vector"]).numpy()
    midpoint, score = fields["midpoint"], None
    if midpoint is not None:
        with at("midpoint"):
            midpoint = Vector.parse(midpoint).numpy()
            if midpoint.shape != vector.shape:
                raise SpecError("", f"expected {len(vector)} numbers, got {len(midpoint)}")
    if fields["score"] is not None:
        with at("score"):
            score_fields = read_fields(fields["score"], required=SCORES, optional=ERRORS)
            # An error may be null: it is unknown.
            numbers = {
                name: float(read_float32(n))
                for name, n in score_fields.items()
                if n is not None or name in SCORES
            }
            score = LayerScore(**numbers)
    return {"layer": fields["layer"], "vector": vector, "midpoint": midpoint, "score": score}
