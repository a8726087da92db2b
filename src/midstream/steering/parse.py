"""Parser of vectors by tap: nested dicts and the keys of files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.plan.operations import Edit
from midstream.plan.selection import unknown_site
from midstream.plan.vectors.matrix import read_vector_or_matrix
from midstream.plan.vectors.vector import Vector
from midstream.sites import ENDS, canonical, parse
from midstream.validation import (
    MAX_ITEMS,
    at,
    is_int,
    kind,
    listed,
    read_fields,
    read_float32,
    read_int,
    show,
)

DEFAULT_SITE = "resid_post"
# Prefixes of a layer's index in other tools' files, for the residual stream after the layer.
LAYER_WORDS = ("layer", "layers", "direction")
# Words of a single vector, and with a layer's index of one of several.
LONE_WORDS = ("vector", "direction", "steering_vector", "control_vector")

_KEY = re.compile(r"(?:(?P<place>[A-Za-z_]+)[.:])?(?P<layer>0|-?[1-9][0-9]{0,5})")
_INDEX = "(0|[1-9][0-9]{0,5})"
# `layer_15`, `vector.15`, `steering_vectors.15`, `layer_15.vector`.
_WORDED = re.compile(
    rf"(?:(?:{'|'.join(LONE_WORDS)})s?|layers?)[._-]?{_INDEX}(?:[._](?:{'|'.join(LONE_WORDS)}))?"
)
# `resid_post_15`, `resid_post.layer_15`, `layer_15.resid_post`.
_SITED = re.compile(rf"([a-z_]+?)[._](?:layer[._]?)?{_INDEX}|layers?[._]?{_INDEX}[._]([a-z_]+)")
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_GRAMMAR = (
    "`15`, `resid_post.15` or `resid_post:15`: a layer index, prefixed by the site's name unless "
    f"it is `{DEFAULT_SITE}` (aliases: {listed(LAYER_WORDS)}); or another tool's name of both, "
    "such as `blocks.15.hook_resid_post` or `layer_15`"
)
_FORMS = (
    "{layer: vector}, {site: {layer: vector}} or {(site, layer): vector}, where a vector may be "
    '{"vector": …, "scale": …}'
)


@dataclass(frozen=True, slots=True)
class Placed:
    """One vector and its tap as given, not yet checked against a model."""

    path: str  # in the input, for messages: `["resid_post"][15]`
    site: str
    layer: int  # −1 is the last
    vector: Vector  # float32 [width], or a Matrix
    scale: float = 1.0


def read_placed(value: object) -> tuple[Placed, ...]:
    """Parse vectors by tap, in the order given: `{layer: vector}` at `resid_post`; `{site: {layer:
    vector}}`; `{(site, layer): vector}`; or `{"resid_post.15": vector}`, the keys of a file. A
    layer is an int or a string of digits; a vector is a value of Vector.parse, `{"vector": …,
    "scale": number}`, or a matrix.
    """
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {_FORMS}, got {kind(value)}")
    placed: list[Placed] = []
    for key, part in _items(value):
        path = path_of(key)
        with at(path):
            site = canonical(key) if isinstance(key, str) else None
            if site is not None:
                placed.extend(_read_layers(path, site, part))
            else:
                placed.append(_read_one(path, *_read_tap(key), part))
    check_distinct(placed)
    return tuple(placed)


def by_tap(vectors: object) -> object:
    """Return what is to be registered as a dict: the vectors of an object with `by_tap()`, as
    `Directions`, or an edit among whole edits. Other values are returned as they are.
    """
    own = getattr(vectors, "by_tap", None)
    if own is not None:
        return own()
    return {"edits": [vectors]} if isinstance(vectors, Edit) else vectors


def read_key(key: str) -> tuple[str, int]:
    """Return (canonical site, layer as given) of a file's key, in any form of `_GRAMMAR`."""
    match = _KEY.fullmatch(key)
    worded = _WORDED.fullmatch(key)
    if worded is not None:
        return DEFAULT_SITE, int(worded[1])
    if match is None:
        sited = _SITED.fullmatch(key)
        site = None if sited is None else canonical(sited[1] or sited[4])
        if sited is None or site is None or site in ENDS:
            return _read_name(key)
        return site, int(sited[2] or sited[3])
    place = match["place"]
    if place is None or place in LAYER_WORDS:
        return DEFAULT_SITE, int(match["layer"])
    site = canonical(place)
    _check_layers(site)
    if site is None:
        raise SpecError("", f"{show(key)}: {unknown_site(place)}")
    return site, int(match["layer"])


def _read_name(key: str) -> tuple[str, int]:
    pair = parse(key)
    # As for other keys, a number has no leading zero.
    if pair is None or _LEADING_ZERO.search(key):
        raise SpecError("", f"{show(key)} is not a tap; expected {_GRAMMAR}")
    site, layer = pair
    _check_layers(site)
    if layer is None:
        raise SpecError("", f"{show(key)} names no layer; expected {_GRAMMAR}")
    return site, layer


def check_distinct(placed: list[Placed]) -> None:
    """Raise SpecError if two vectors have the same site and layer, as given."""
    first: dict[tuple[str, int], str] = {}
    for vector in placed:
        tap = (vector.site, vector.layer)
        if tap in first:
            raise SpecError(
                vector.path,
                f"a second vector for {vector.site} of layer {vector.layer}, after {first[tap]}",
            )
        first[tap] = vector.path


def _items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    if not value:
        raise SpecError("", f"the dict is empty; expected {_FORMS}")
    if len(value) > MAX_ITEMS:
        raise SpecError("", f"expected at most {MAX_ITEMS} vectors, got {len(value)}")
    return list(value.items())


def _check_layers(site: str | None) -> None:
    if site in ENDS:
        raise SpecError(
            "",
            f"{site} has no layer; register a single vector, and give the site where it is used: "
            f'Steer("name", site="{site}")',
        )


def _read_layers(path: str, site: str, value: object) -> list[Placed]:
    if not isinstance(value, Mapping) or "f32" in value or "vector" in value:
        got = "one vector" if isinstance(value, Mapping) else kind(value)
        raise SpecError("", f"expected {{layer: vector}}, got {got}; specify the layer")
    placed = []
    for key, part in _items(value):
        inner = path_of(key)
        with at(inner):
            placed.append(_read_one(path + inner, site, _read_layer(key), part))
    return placed


def _read_tap(key: object) -> tuple[str, int]:
    if isinstance(key, tuple):
        if len(key) != 2 or not isinstance(key[0], str):
            raise SpecError("", "expected a key (site, layer)")
        site = canonical(key[0])
        if site is None:
            raise SpecError("", unknown_site(key[0]))
        return site, _read_layer(key[1])
    if key in ("vector", "f32"):
        raise SpecError("", 'a vector needs a layer: {15: vector} or {15: {"vector": vector}}')
    if isinstance(key, str) and re.fullmatch("[A-Za-z_]+", key):
        raise SpecError("", unknown_site(key))
    if isinstance(key, str):
        return read_key(key)
    return DEFAULT_SITE, _read_layer(key)


def _read_layer(key: object) -> int:
    if isinstance(key, str):
        match = _KEY.fullmatch(key)
        if match is None or match["place"] is not None:
            raise SpecError("", f"expected a layer index, got {show(key)}")
        return int(match["layer"])
    if not is_int(key):
        raise SpecError("", f"expected a layer index, `int`, got {kind(key)}")
    return read_int(key)


def _read_one(path: str, site: str, layer: int, value: object) -> Placed:
    _check_layers(site)
    if not isinstance(value, Mapping) or "f32" in value:
        return Placed(path, site, layer, read_vector_or_matrix(value))
    fields = read_fields(value, required=("vector",), optional=("scale",))
    with at("vector"):
        vector = read_vector_or_matrix(fields["vector"])
    with at("scale"):
        return Placed(path, site, layer, vector, read_float32(fields.get("scale", 1.0)))


def path_of(key: object) -> str:
    """Return a key in index notation, for messages: `[15]`, `["resid_post"]`."""
    if is_int(key):
        return f"[{show(int(key))}]"
    if isinstance(key, str):
        return f"[{json.dumps(key if len(key) <= 60 else key[:60] + '…', ensure_ascii=False)}]"
    if isinstance(key, tuple) and len(key) == 2:
        return f"[({path_of(key[0])[1:-1]}, {path_of(key[1])[1:-1]})]"
    return f"[{kind(key)}]"
