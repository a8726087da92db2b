"""EasySteer's `SteeringSpec`, as JSON, translated into a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from midstream.compat.packed_arrays import read_array
from midstream.errors import SpecError
from midstream.plan import Ablate, Edit, Plan, Replace, Steer, TokenIds, Window
from midstream.plan.positions.items import Item, Span
from midstream.plan.vectors.vector import Vector
from midstream.validation import (
    MAX_PARTS,
    at,
    is_int,
    kind,
    listed,
    read_fields,
    read_float32,
    read_word,
    show,
)

FIELDS = ("steering",)
_OPTIONAL = ("source", "data", "algorithm", "scale", "layers", "normalize", "params", "name")
_ALGORITHMS = ("direct", "erase", "replace")
_CONFLICTS = ("priority", "sequential", "error")
_PHASES = {"prompt": "prompt", "generation": "generated"}
_SELECTORS = tuple(
    f"{exclude}{phase}_{what}"
    for exclude in ("", "exclude_")
    for phase in _PHASES
    for what in ("tokens", "positions", "window")
)


def read_plan(fields: Mapping[str, object]) -> Plan:
    """Return the plan of `steering`: `{"vectors": [{"data": {…}, "apply": {…}}], "conflict"}`."""
    with at("steering"):
        value = fields["steering"]
        if not isinstance(value, Mapping) and hasattr(value, "model_dump"):
            value = value.model_dump()
        if isinstance(value, bool):
            raise SpecError(
                "",
                "a request cannot switch server-wide steering off; leave the field out, and clear "
                "the steering of the server",
            )
        if isinstance(value, list):
            raise SpecError("", "a list of gates has no equal here; give `edits`: Gate(…)")
        spec = read_fields(value, required=("vectors",), optional=("conflict", "debug"))
        vectors = spec["vectors"]
        if not isinstance(vectors, list) or not vectors:
            raise SpecError("vectors", f"expected a list of vectors, got {kind(vectors)}")
        edits: list[Edit] = []
        layers: list[int] = []
        for index, vector in enumerate(vectors):
            with at(f"vectors[{index}]"):
                pairs = list(_read_vector(vector))
            edits += [edit for _, edit in pairs]
            layers += sorted({layer for layer, _ in pairs})
            if len(edits) > MAX_PARTS:
                raise SpecError("vectors", f"expected at most {MAX_PARTS} edits")
        with at("conflict"):
            conflict = read_word(spec.get("conflict", "priority"), _CONFLICTS)
            if conflict != "sequential" and len(set(layers)) < len(layers):
                raise SpecError(
                    "",
                    f'"{conflict}" has no equal here where several vectors have a layer in common: '
                    'edits add up in order, as with "sequential"',
                )
        return Plan(edits=tuple(edits))


def _read_vector(value: object) -> Iterator[tuple[int, Edit]]:
    fields = read_fields(value, required=("apply",), optional=_OPTIONAL)
    with at("algorithm"):
        algorithm = read_word(fields.get("algorithm", "direct"), _ALGORITHMS)
    if fields.get("params"):
        raise SpecError("params", f"`{algorithm}` has no parameters")
    if fields.get("source") is not None:
        raise SpecError(
            "source",
            "no file of the server is read for a request: register it as a name, and give "
            '`edits`: Steer("name"); or send the vectors in `data`',
        )
    with at("scale"):
        scale = read_float32(fields.get("scale", 1.0))
    normalize = fields.get("normalize", False)
    if not isinstance(normalize, bool):
        raise SpecError("normalize", f"expected `bool`, got {kind(normalize)}")
    if normalize and algorithm != "direct":
        raise SpecError("normalize", f"has no equal here for `{algorithm}`")
    with at("data"):
        rows = _read_payload(fields.get("data"))
    layers = fields.get("layers")
    with at("layers"):
        rows = rows if layers is None else _only(rows, layers)
    with at("apply"):
        places = _read_clause(fields["apply"])
    for layer, row in rows.items():
        for place in places:
            yield layer, _edit(algorithm, row, layer, scale, normalize, place)


def _edit(
    algorithm: str, row: Any, layer: int, scale: float, normalize: bool, place: dict[str, Any]
) -> Edit:
    if algorithm == "direct":
        return Steer(row, layer, scale, norm="keep" if normalize else None, **place)
    if algorithm == "replace":
        return Replace(row * row.dtype.type(scale), layer, **place)
    if scale == 0:
        raise SpecError("scale", "`erase` with a scale of 0 erases nothing")
    return Ablate(row, layer, **place)


def _read_payload(value: object) -> dict[int, Any]:
    """Return the vectors of a direction payload, by layer."""
    if value is None:
        raise SpecError("", "missing: send the vectors")
    if not isinstance(value, Mapping) and hasattr(value, "to_wire"):
        value = value.to_wire()
    fields = read_fields(
        value, required=("kind", "tensors"), optional=("version", "extra", "sha256")
    )
    if fields.get("version", 1) != 1:
        raise SpecError("version", "expected 1")
    with at("kind"):
        read_word(fields["kind"], ("direction",))
    tensors = fields["tensors"]
    if not isinstance(tensors, Mapping) or not tensors:
        raise SpecError("tensors", f"expected a dict of tensors, got {kind(tensors)}")
    rows = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"layer\.(0|[1-9][0-9]{0,5})", name) if isinstance(name, str) else None
        with at(f"tensors[{show(str(name))}]"):
            if match is None:
                raise SpecError("", "expected a name like `layer.15`")
            packed = read_fields(tensor, required=("shape", "data"))
            row = read_array(packed["data"], packed["shape"])
            Vector.parse(row)
            rows[int(match[1])] = row
    return rows


def _only(rows: dict[int, Any], layers: object) -> dict[int, Any]:
    if not isinstance(layers, (list, tuple)) or not all(is_int(layer) for layer in layers):
        raise SpecError("", "expected a list of layers")
    missing = [layer for layer in layers if layer not in rows]
    if missing:
        raise SpecError("", f"`data` has no vector for layer {missing[0]}")
    return {layer: row for layer, row in rows.items() if layer in layers}


def _read_clause(value: object) -> list[dict[str, Any]]:
    """Return the positions, phase and exclusions of each phase that a clause covers."""
    if not isinstance(value, Mapping) and hasattr(value, "model_dump"):
        value = value.model_dump()
    fields = read_fields(value, required=(), optional=("phases", *_PHASES, *_SELECTORS))
    fields = {name: part for name, part in fields.items() if part is not None}
    phases = fields.pop("phases", None)
    if phases is not None:
        fields = {**fields, **_whole(phases, fields)}
    places = []
    for phase, word in _PHASES.items():
        is_whole = phase in fields
        if is_whole:
            with at(phase):
                read_word(fields[phase], ("all",))
        include = _items(fields, phase, "")
        exclude = _items(fields, phase, "exclude_")
        if exclude and not (is_whole or include):
            raise SpecError("", f"excludes {phase} tokens, but selects none")
        if is_whole or include:
            place: dict[str, Any] = {"phase": word}
            if not is_whole:
                place["positions"] = include
            if exclude:
                place["exclude"] = exclude
            places.append(place)
    if not places:
        raise SpecError("", f"selects nothing; expected some of {listed(_PHASES)}")
    if places == [{"phase": word} for word in _PHASES.values()]:
        return [{}]
    return places


def _whole(phases: object, fields: Mapping[str, object]) -> dict[str, str]:
    """Return the form without `phases`, which an earlier EasySteer had."""
    if not isinstance(phases, list) or any(phase not in list(_PHASES) for phase in phases):
        raise SpecError("phases", f"expected some of {listed(_PHASES)}")
    if fields:
        raise SpecError("phases", "give `prompt` and `generation`, or selectors, without it")
    return dict.fromkeys(phases, "all")


def _items(fields: Mapping[str, object], phase: str, exclude: str) -> list[Item]:
    items: list[Item] = []
    generated = phase == "generation"
    name = f"{exclude}{phase}_tokens"
    if name in fields:
        with at(name):
            items.append(TokenIds(fields[name]))
    name = f"{exclude}{phase}_positions"
    if name in fields:
        with at(name):
            for index in _ints(fields[name], generated):
                items.append(Window(index, index + 1) if generated else index)
    name = f"{exclude}{phase}_window"
    if name in fields:
        with at(name):
            start, stop = _bounds(fields[name], generated)
            items.append(Window(start, stop) if generated else Span(start, stop))
    return items


def _ints(value: object, generated: bool) -> list[int]:
    if not isinstance(value, (list, tuple)) or not value:
        raise SpecError("", f"expected a list of positions, got {kind(value)}")
    for index, position in enumerate(value):
        if not is_int(position) or (generated and position < 0):
            raise SpecError(f"[{index}]", "expected an `int`" + " from 0" * generated)
    return [int(number) for number in value]


def _bounds(value: object, generated: bool) -> tuple[int, int | None]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise SpecError("", f"expected [start, stop], got {kind(value)}")
    start, stop = value
    return _ints([start], generated)[0], None if stop is None else _ints([stop], generated)[0]
