"""The form in which a resolved plan travels to the workers. Never pickle.

- 4 bytes: `MSP1`.
- 4 bytes: H, the header's length in bytes, unsigned, little-endian.
- H bytes: the header, JSON: `prompt_len`; `vectors`, the size of each; `edits` and `captures`, as
  lists of dicts of their fields, where an edit's `vector` is an index into `vectors`.
- The vectors, little-endian float32, one after the other, each distinct one once, in the order in
  which the edits first use them.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from midstream.errors import SpecError
from midstream.sites import NAMES
from midstream.spec.fields import (
    at,
    kind,
    read_fields,
    read_float32,
    read_int,
    read_json,
    read_word,
)
from midstream.spec.ranges import Range, Ranges, well_formed
from midstream.spec.resolved import ResolvedCapture, ResolvedEdit, ResolvedPlan, Tap
from midstream.spec.vector import Vector

MAGIC = b"MSP1"

_START = struct.Struct("<4sI")


def to_bytes(plan: ResolvedPlan) -> bytes:
    """The plan's wire form."""
    places: dict[Vector, int] = {}
    for edit in plan.edits:
        places.setdefault(edit.vector, len(places))
    header = {
        "prompt_len": plan.prompt_len,
        "vectors": [vector.size for vector in places],
        "edits": [
            {
                "site": edit.site,
                "layer": edit.layer,
                "vector": places[edit.vector],
                "scale": edit.scale,
                "ranges": edit.ranges,
            }
            for edit in plan.edits
        ],
        "captures": [
            {"taps": capture.taps, "ranges": capture.ranges, "last_from": capture.last_from}
            for capture in plan.captures
        ],
    }
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return b"".join((_START.pack(MAGIC, len(text)), text, *(vector.data for vector in places)))


def from_bytes(data: bytes) -> ResolvedPlan:
    """The plan of a wire form.

    Raises:
        SpecError: it is not exactly what `to_bytes` writes of some plan.
    """
    if not isinstance(data, bytes):
        raise SpecError("", f"expected `bytes`, got {kind(data)}")
    if len(data) < _START.size:
        raise SpecError("", f"expected a plan of at least {_START.size} bytes, got {len(data)}")
    magic, length = _START.unpack_from(data)
    if magic != MAGIC:
        raise SpecError("", f"expected a plan that starts with {MAGIC!r}, got {magic!r}")
    body = data[_START.size + length :]
    text = data[_START.size : _START.size + length]
    if len(text) < length:
        raise SpecError("", f"the header is cut off: {len(text)} of {length} bytes")
    header = read_fields(read_json(text), ("prompt_len", "vectors", "edits", "captures"))
    with at("prompt_len"):
        prompt_len = _natural(header["prompt_len"], at_least=1)
    vectors = _read_vectors(header["vectors"], body)
    edits: list[ResolvedEdit] = []
    for index, value in enumerate(_list("edits", header["edits"])):
        with at(f"edits[{index}]"):
            edits.append(_read_edit(value, vectors))
    captures: list[ResolvedCapture] = []
    for index, value in enumerate(_list("captures", header["captures"])):
        with at(f"captures[{index}]"):
            captures.append(_read_capture(value, prompt_len))
    if list(dict.fromkeys(edit.vector for edit in edits)) != vectors:
        raise SpecError("vectors", "expected the edits' vectors, each once, in order of first use")
    return ResolvedPlan(prompt_len, tuple(edits), tuple(captures))


def _read_vectors(sizes: object, body: bytes) -> list[Vector]:
    found = []
    offset = 0
    for index, value in enumerate(_list("vectors", sizes)):
        with at(f"vectors[{index}]"):
            stop = offset + 4 * _natural(value, at_least=1)
            if stop > len(body):
                raise SpecError("", f"the vector is cut off at {len(body)} of {stop} bytes")
            found.append(Vector(body[offset:stop]))
            offset = stop
    if offset != len(body):
        raise SpecError("vectors", f"expected {offset} bytes of vectors, got {len(body)}")
    return found


def _read_edit(value: object, vectors: list[Vector]) -> ResolvedEdit:
    given = read_fields(value, ("site", "layer", "vector", "scale", "ranges"))
    site, layer = _read_tap([given["site"], given["layer"]])
    with at("vector"):
        place = _natural(given["vector"])
        if place >= len(vectors):
            raise SpecError("", f"there is no vector {place}, of {len(vectors)}")
    with at("scale"):
        scale = read_float32(given["scale"])
    with at("ranges"):
        ranges = _read_ranges(given["ranges"])
        if not ranges:
            raise SpecError("", "expected at least one range")
    return ResolvedEdit(site, layer, vectors[place], scale, ranges)


def _read_capture(value: object, prompt_len: int) -> ResolvedCapture:
    given = read_fields(value, ("taps", "ranges", "last_from"))
    taps = tuple(_read_taps(given["taps"]))
    with at("ranges"):
        ranges = _read_ranges(given["ranges"])
    with at("last_from"):
        last_from = given["last_from"]
        if last_from is not None:
            last_from = _natural(last_from)
            if last_from not in (prompt_len - 1, prompt_len):
                raise SpecError("", f"expected the prompt's end or None, got {last_from}")
        elif not ranges:
            raise SpecError("", "nothing is captured: there are no ranges either")
    return ResolvedCapture(taps, ranges, last_from)


def _read_taps(value: object) -> list[Tap]:
    found: list[Tap] = []
    for index, item in enumerate(_list("taps", value)):
        with at(f"taps[{index}]"):
            found.append(_read_tap(item))
    if not found or len(set(found)) < len(found):
        raise SpecError("taps", "expected at least one tap, and each once")
    return found


def _read_tap(value: object) -> Tap:
    if not isinstance(value, list) or len(value) != 2:
        raise SpecError("", f"expected [site, layer], got {kind(value)}")
    with at("site"):
        site = read_word(value[0], NAMES)
    with at("layer"):
        return (site, _natural(value[1]))


def _read_ranges(value: object) -> Ranges:
    found: list[Range] = []
    for item in _list("", value):
        if not isinstance(item, list) or len(item) != 2:
            raise SpecError(f"[{len(found)}]", f"expected [start, stop], got {kind(item)}")
        start, stop = item
        with at(f"[{len(found)}]"):
            found.append((_natural(start), None if stop is None else _natural(stop)))
    ranges = tuple(found)
    if not well_formed(ranges):
        raise SpecError("", "expected ranges that are not empty, sorted, and do not touch")
    return ranges


def _list(path: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SpecError(path, f"expected a list, got {kind(value)}")
    return value


def _natural(value: object, at_least: int = 0) -> int:
    found = read_int(value)
    if found < at_least:
        raise SpecError("", f"expected at least {at_least}, got {found}")
    return found
