"""The form in which a resolved plan travels to the workers. Never pickle.

- 4 bytes: `MSP3`.
- 4 bytes: H, the header's length in bytes, unsigned, little-endian.
- H bytes: the header, JSON: `prompt_len`; `vectors`, the size of each; `steps`, lists of
  instructions, in which vectors are indices into `vectors`; `edits`, `captures` and `probes`, as
  lists of dicts of their fields, in which `steps` is an index.
- The vectors, little-endian float32, one after the other, each distinct one once.
"""

from __future__ import annotations

import json
import struct
from itertools import combinations
from typing import Any

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.sites import NAMES, Tap
from midstream.spec.instructions import Instruction
from midstream.spec.positions.position_set import Match, Where
from midstream.spec.positions.range_set import intersect
from midstream.spec.positions.ranges import Range, Ranges, well_formed
from midstream.spec.resolve.resolved import (
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
)
from midstream.spec.vector import Vector
from midstream.validation import at, kind, read_fields, read_float32, read_int, read_json, read_word

MAGIC = b"MSP3"

_START = struct.Struct("<4sI")
_NONE = -1


def to_bytes(plan: ResolvedPlan) -> bytes:
    """The plan's wire form."""
    vectors: dict[Vector, int] = {}
    steps: dict[str, tuple[int, Steps]] = {}
    used = [edit.steps for edit in plan.edits] + [probe.steps for probe in plan.probes]
    for each in used:
        steps.setdefault(each.digest, (len(steps), each))
    packed = [
        [_pack_instruction(one, vectors) for one in found.instructions]
        for _, found in steps.values()
    ]
    header = {
        "prompt_len": plan.prompt_len,
        "codec": plan.codec,
        "sharded": plan.sharded,
        "vectors": [vector.size for vector in vectors],
        "steps": packed,
        "edits": [
            {
                "site": edit.site,
                "layer": edit.layer,
                "steps": steps[edit.steps.digest][0],
                "where": _pack_where(edit.where),
                "source": edit.source,
            }
            for edit in plan.edits
        ],
        "captures": [
            {"taps": capture.taps, "where": _pack_where(capture.where), "source": capture.source}
            for capture in plan.captures
        ],
        "probes": [
            {
                "name": probe.name,
                "site": probe.site,
                "layer": probe.layer,
                "steps": steps[probe.steps.digest][0],
                "where": _pack_where(probe.where),
            }
            for probe in plan.probes
        ],
    }
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return b"".join((_START.pack(MAGIC, len(text)), text, *(vector.data for vector in vectors)))


def from_bytes(data: bytes) -> ResolvedPlan:
    """The plan of a wire form.

    Raises:
        SpecError: it is not what `to_bytes` writes of some plan.
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
    names = ("prompt_len", "codec", "sharded", "vectors", "steps", "edits", "captures", "probes")
    header = read_fields(read_json(text), names)
    with at("prompt_len"):
        prompt_len = _natural(header["prompt_len"], at_least=1)
    vectors = _read_vectors(header["vectors"], body)
    listed = _list("steps", header["steps"])
    steps = [_read_steps(nth, value, vectors) for nth, value in enumerate(listed)]
    edits: list[ResolvedEdit] = []
    for index, value in enumerate(_list("edits", header["edits"])):
        with at(f"edits[{index}]"):
            edits.append(_read_edit(value, steps))
    captures: list[ResolvedCapture] = []
    for index, value in enumerate(_list("captures", header["captures"])):
        with at(f"captures[{index}]"):
            captures.append(_read_capture(value))
    probes: list[ResolvedProbe] = []
    for index, value in enumerate(_list("probes", header["probes"])):
        with at(f"probes[{index}]"):
            probes.append(_read_probe(value, steps))
    if not isinstance(header["codec"], str):
        raise SpecError("codec", f"expected `str`, got {kind(header['codec'])}")
    if not isinstance(header["sharded"], bool):
        raise SpecError("sharded", f"expected `bool`, got {kind(header['sharded'])}")
    plan = ResolvedPlan(
        prompt_len,
        tuple(edits),
        tuple(captures),
        tuple(probes),
        header["codec"],
        header["sharded"],
    )
    if to_bytes(plan) != data:
        raise SpecError("", "the plan is not in the form in which plans are written")
    return plan


def _pack_instruction(step: Instruction, vectors: dict[Vector, int]) -> list[object]:
    def index(vector: Vector | None) -> int:
        return _NONE if vector is None else vectors.setdefault(vector, len(vectors))

    return [
        int(step.op),
        index(step.read),
        [index(vector) for vector in step.write],
        [step.a, step.b, step.c, step.d],
        int(step.flags),
        _NONE if step.slot is None else step.slot,
        step.first,
    ]


def _pack_where(where: Where) -> list[object]:
    matches = [[match.ranges, match.ids, match.others] for match in where.matches]
    return [where.ranges, matches, where.last_from]


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


def _read_steps(index: int, value: object, vectors: list[Vector]) -> Steps:
    with at(f"steps[{index}]"):
        found = []
        for nth, one in enumerate(_list("", value)):
            with at(f"[{nth}]"):
                found.append(_read_instruction(one, vectors))
        if not found:
            raise SpecError("", "expected at least one instruction")
        return Steps(tuple(found))


def _read_instruction(value: object, vectors: list[Vector]) -> Instruction:
    op, read, write, params, flags, slot, first = _exactly(7, value)

    def vector(index: object) -> Vector:
        place = _natural(index)
        if place >= len(vectors):
            raise SpecError("", f"there is no vector {place}, of {len(vectors)}")
        return vectors[place]

    bits = _natural(flags)
    # An IntFlag keeps bits that it does not know, and its ~ is among those that it does.
    if bits & ~_ALL_FLAGS:
        raise SpecError("", f"unknown flags {bits}")
    try:
        code = Op(_natural(op))
    except ValueError as error:
        raise SpecError("", str(error)) from None
    a, b, c, d = (read_float32(each) for each in _exactly(4, params))
    return Instruction(
        op=code,
        read=None if read == _NONE else vector(read),
        write=tuple(vector(each) for each in _list("write", write)),
        a=a,
        b=b,
        c=c,
        d=d,
        flags=Flags(bits),
        slot=None if slot == _NONE else _natural(slot),
        first=_natural(first),
    )


_ALL_FLAGS = sum(int(flag) for flag in Flags)


def _read_edit(value: object, steps: list[Steps]) -> ResolvedEdit:
    given = read_fields(value, ("site", "layer", "steps", "where", "source"))
    site, layer = _read_tap([given["site"], given["layer"]])
    with at("where"):
        where = _read_where(given["where"])
        if where.last_from is not None:
            raise SpecError("", "the last row cannot be edited")
    with at("source"):
        source = read_int(given["source"])
    return ResolvedEdit(site, layer, _choose_steps(given["steps"], steps), where, source)


def _read_probe(value: object, steps: list[Steps]) -> ResolvedProbe:
    given = read_fields(value, ("name", "site", "layer", "steps", "where"))
    name = given["name"]
    if not isinstance(name, str):
        raise SpecError("name", f"expected `str`, got {kind(name)}")
    site, layer = _read_tap([given["site"], given["layer"]])
    found = _choose_steps(given["steps"], steps)
    if len(found.instructions) != 1 or found.instructions[0].op is not Op.PROBE:
        raise SpecError("steps", "expected one PROBE")
    if found.instructions[0].slot is None:
        raise SpecError("steps", "expected a PROBE with a slot")
    with at("where"):
        return ResolvedProbe(name, site, layer, found, _read_where(given["where"]))


def _choose_steps(value: object, steps: list[Steps]) -> Steps:
    with at("steps"):
        place = _natural(value)
        if place >= len(steps):
            raise SpecError("", f"there are no steps {place}, of {len(steps)}")
        return steps[place]


def _read_capture(value: object) -> ResolvedCapture:
    given = read_fields(value, ("taps", "where", "source"))
    taps = tuple(_read_taps(given["taps"]))
    with at("source"):
        source = read_int(given["source"])
    with at("where"):
        return ResolvedCapture(taps, _read_where(given["where"]), source)


def _read_where(value: object) -> Where:
    ranges, matches, last_from = _exactly(3, value)
    found = []
    for nth, match in enumerate(_list("", matches)):
        with at(f"matches[{nth}]"):
            found.append(_read_match(match))
    where = Where(
        _read_ranges(ranges), tuple(found), None if last_from is None else _natural(last_from)
    )
    if not where.possible:
        raise SpecError("", "nothing is selected")
    parts = [where.ranges, *(match.ranges for match in where.matches)]
    if any(intersect(one, other) for one, other in combinations(parts, 2)):
        raise SpecError("", "expected ranges and matches that have no position in common")
    return where


def _read_match(value: object) -> Match:
    ranges, ids, others = _exactly(3, value)
    if not isinstance(others, bool):
        raise SpecError("", f"expected `bool`, got {kind(others)}")
    # Without an id it would be whatever the id, and without a range nowhere.
    found = Match(_read_ranges(ranges), tuple(_natural(each) for each in _list("", ids)), others)
    if not found.ranges or not found.ids or list(found.ids) != sorted(set(found.ids)):
        raise SpecError("", "expected at least one range, and at least one id, ascending")
    return found


def _read_taps(value: object) -> list[Tap]:
    found: list[Tap] = []
    for index, item in enumerate(_list("taps", value)):
        with at(f"taps[{index}]"):
            found.append(_read_tap(item))
    if not found or len(set(found)) < len(found):
        raise SpecError("taps", "expected at least one tap, and each once")
    return found


def _read_tap(value: object) -> Tap:
    site, layer = _exactly(2, value)
    with at("site"):
        name = read_word(site, NAMES)
    with at("layer"):
        return (name, _natural(layer))


def _read_ranges(value: object) -> Ranges:
    found: list[Range] = []
    for item in _list("", value):
        with at(f"[{len(found)}]"):
            start, stop = _exactly(2, item)
            found.append((_natural(start), None if stop is None else _natural(stop)))
    ranges = tuple(found)
    if not well_formed(ranges):
        raise SpecError("", "expected ranges that are not empty, sorted, and do not touch")
    return ranges


def _list(path: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SpecError(path, f"expected a list, got {kind(value)}")
    return value


def _exactly(length: int, value: object) -> list[Any]:
    found = _list("", value)
    if len(found) != length:
        raise SpecError("", f"expected {length} items, got {len(found)}")
    return found


def _natural(value: object, at_least: int = 0) -> int:
    found = read_int(value)
    if found < at_least:
        raise SpecError("", f"expected at least {at_least}, got {found}")
    return found
