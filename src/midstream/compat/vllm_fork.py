"""Arguments of the vLLM fork with steering, translated into a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from midstream.compat.packed_arrays import read_array
from midstream.errors import SpecError
from midstream.plan import Clamp, Edit, Plan, Replace, Steer
from midstream.plan.consumers import names_consumers
from midstream.plan.forms import PhaseLike
from midstream.plan.readouts import ReadOut
from midstream.plan.selection import Sites, read_site
from midstream.plan.vectors.vector import Vector
from midstream.steering.edit_forms import read_hooks, read_reference
from midstream.steering.parse import path_of
from midstream.validation import MAX_PARTS, at, is_int, kind, read_fields, read_float32, read_int

# Arguments with vectors by hook point, and the phase of the tokens that they apply to.
TIERS: dict[str, PhaseLike | None] = {
    "steering_vectors": None,
    "prefill_steering_vectors": "prompt",
    "decode_steering_vectors": "generated",
}
CLAMPS = {name.replace("vectors", "clamps"): phase for name, phase in TIERS.items()}
NAMES = ("steering_name", "steering_module_ref")
# Arguments of the fork's SamplingParams that midstream's has too.
ARGUMENTS = (*TIERS, *CLAMPS, "steering_module_ref", "patch", "patch_vectors")
FIELDS = (*ARGUMENTS, "steering_name", "capture", "capture_wait")
_DIGITS = 10  # of a layer that is text, at most


def read_edits(fields: Mapping[str, object]) -> list[Edit]:
    """Return the edits of some of the fork's arguments, in the fork's order.

    `patch`: [{"layer", "hook", "dest_position", "source_inline", "alpha"}], and `patch_vectors`;
    NAMES: a registered name, possibly with a scale; TIERS: {hook point: {layer: vector}}, or packed
    {"dtype", "shape", "layer_indices", "data", "scales"}; CLAMPS: {hook point: {layer: [{"vector",
    "min", "max", "value", "strength"}]}}, or packed with "bounds" and "strengths".
    """
    edits: list[Edit] = list(_read_patch(fields))
    for name in NAMES:
        if name in fields:
            with at(name):
                edits.append(Steer(read_reference(fields[name])))
    for name, phase in TIERS.items():
        if name in fields:
            with at(name):
                edits += [part.edit for part in read_hooks(unpacked(fields[name]), phase)]
    for name, phase in CLAMPS.items():
        if name in fields:
            with at(name):
                edits += read_clamps(fields[name], phase)
    if len(edits) > MAX_PARTS:
        raise SpecError("", f"expected at most {MAX_PARTS} edits, got {len(edits)}")
    return edits


def read_plan(fields: Mapping[str, object]) -> Plan:
    """Return the plan of a body's fields: those of `read_edits`, `capture` and `capture_wait`."""
    wait = fields.get("capture_wait")
    if wait is not None and (not isinstance(wait, bool) or "capture" not in fields):
        raise SpecError("capture_wait", "expected a bool, beside `capture`")
    edits = read_edits(fields)
    if "capture" not in fields:
        return Plan(edits=tuple(edits))
    capture = fields["capture"]
    if not names_consumers(capture):
        raise SpecError("capture", 'expected {consumer: {"hooks": {hook point: [layer, …]}}}')
    made = Plan.make(capture=capture)
    assert made is not None
    if any(_meet(part, edit) for part in made.captures for edit in edits):
        raise SpecError(
            "capture",
            "the fork records rows before the edits of their hook point, midstream after them; "
            "capture elsewhere, or give both in the field `midstream`",
        )
    return Plan(made.captures, tuple(edits))


def _meet(capture: ReadOut, edit: Edit) -> bool:
    if getattr(edit, "names", tuple)():
        return True  # a name may have any site and layer
    first, second = capture.layers.indices, edit.layers.indices
    layers = (
        first == "all" or second == "all" or min(first) < 0 or not set(first).isdisjoint(second)
    )
    return layers and bool(set(capture.sites) & set(edit.sites))


def unpacked(value: object) -> object:
    """Return vectors by hook point with packed parts as {layer: {"vector": …, "scale": …}}."""
    if not isinstance(value, Mapping):
        return value
    hooks = {}
    for hook, part in value.items():
        if _is_packed(part):
            with at(path_of(hook)):
                fields = read_fields(part, required=_PACKED, optional=("scales",))
                layers, rows = _read_rows(fields)
                scales = _per_row(fields, "scales", len(rows))
                if len(set(layers)) < len(layers):
                    raise SpecError("layer_indices", "a layer is listed twice")
                part = {
                    layer: {"vector": row, "scale": 1.0 if scale is None else scale}
                    for layer, row, scale in zip(layers, rows, scales, strict=True)
                }
        hooks[hook] = part
    return hooks


_PACKED = ("dtype", "shape", "layer_indices", "data")


def _is_packed(part: object) -> bool:
    return isinstance(part, Mapping) and "layer_indices" in part and "data" in part


def _read_rows(fields: Mapping[str, object]) -> tuple[list[int], Any]:
    rows = read_array(fields["data"], fields["shape"], fields["dtype"])
    if rows.ndim != 2:
        raise SpecError("shape", "expected [layers, width]")
    layers = fields["layer_indices"]
    if not isinstance(layers, (list, tuple)) or len(layers) != len(rows):
        raise SpecError("layer_indices", f"expected a list of {len(rows)} layers")
    for index, layer in enumerate(layers):
        if not is_int(layer) or layer < 0:
            raise SpecError(f"layer_indices[{index}]", "expected an `int` from 0")
    return [int(layer) for layer in layers], rows


def _per_row(fields: Mapping[str, object], name: str, count: int) -> list[Any]:
    value = fields.get(name)
    if value is None:
        return [None] * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise SpecError(name, f"expected a list of {count} values")
    return list(value)


def read_clamps(value: object, phase: PhaseLike | None) -> Iterator[Clamp]:
    """Yield the clamps of one of CLAMPS; see `read_edits`."""
    if not isinstance(value, Mapping) or not value:
        raise SpecError("", f"expected {{hook point: {{layer: [clamp, …]}}}}, got {kind(value)}")
    for hook, part in value.items():
        with at(path_of(hook)):
            site = read_site(hook)
            for path, layer, entry in _clamp_entries(part):
                with at(path):
                    yield _read_clamp(entry, layer, site, phase)


def _clamp_entries(part: object) -> Iterator[tuple[str, int, object]]:
    """Yield the clamps of one hook point, each with its path and layer."""
    if _is_packed(part):
        fields = read_fields(part, required=(*_PACKED, "bounds"), optional=("strengths",))
        layers, rows = _read_rows(fields)
        bounds = _per_row(fields, "bounds", len(rows))
        strengths = _per_row(fields, "strengths", len(rows))
        for index, layer in enumerate(layers):
            pair = bounds[index]
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise SpecError(f"bounds[{index}]", "expected [low, high], null for no bound")
            entry = {"vector": rows[index], "min": pair[0], "max": pair[1]}
            if strengths[index] is not None:
                entry["strength"] = strengths[index]
            yield f"bounds[{index}]", layer, entry
        return
    if not isinstance(part, Mapping) or not part:
        raise SpecError("", f"expected {{layer: [clamp, …]}}, got {kind(part)}")
    for key, entries in part.items():
        with at(path_of(key)):
            is_text = isinstance(key, str) and key.isdecimal() and len(key) < _DIGITS
            layer = int(key) if is_text else read_int(key)
            if layer < 0 or not isinstance(entries, (list, tuple)) or not entries:
                raise SpecError("", "expected a layer from 0, and a list of clamps")
        for index, entry in enumerate(entries):
            yield f"{path_of(key)}[{index}]", layer, entry


def _read_clamp(value: object, layer: int, site: Any, phase: PhaseLike | None) -> Clamp:
    optional = ("min", "max", "value", "strength")
    fields = read_fields(value, required=("vector",), optional=optional)
    strength = fields.get("strength", 1.0)
    with at("strength"):
        if not 0 <= read_float32(strength) <= 1:
            raise SpecError("", f"expected 0 to 1, got {strength!r}")
    try:
        return Clamp(
            fields["vector"], layer, fields.get("value"), fields.get("min"), fields.get("max"),
            strength, site=site, phase=phase,
        )  # fmt: skip
    except SpecError as error:
        names = {"direction": "vector", "low": "min", "high": "max"}
        head = error.path.split("[")[0]
        path = names.get(head, head) + error.path.removeprefix(head)
        raise SpecError(path, error.problem) from None


def _read_patch(fields: Mapping[str, object]) -> Iterator[Replace]:
    if "patch" not in fields:
        if "patch_vectors" in fields:
            raise SpecError("patch_vectors", "expected `patch` with it")
        return
    rows = None
    if "patch_vectors" in fields:
        with at("patch_vectors"):
            packed = read_fields(fields["patch_vectors"], required=("dtype", "shape", "data"))
            rows = read_array(packed["data"], packed["shape"], packed["dtype"])
            if rows.ndim != 2:
                raise SpecError("shape", "expected [rows, width]")
    vectors: dict[int, Vector] = {}  # a row that many patches take is read once
    entries = fields["patch"]
    if not isinstance(entries, (list, tuple)) or not entries:
        raise SpecError("patch", f"expected a list of sites, got {kind(entries)}")
    for index, entry in enumerate(entries):
        with at(f"patch[{index}]"):
            yield _read_site_patch(entry, rows, vectors)


def _read_site_patch(value: object, rows: Any, vectors: dict[int, Vector]) -> Replace:
    optional = (
        "source_inline", "alpha", "source_run", "source_position", "source_module", "mask",
    )  # fmt: skip
    fields = read_fields(value, required=("layer", "hook", "dest_position"), optional=optional)
    for name in optional[2:]:
        if fields.get(name) is not None:
            raise SpecError(
                name,
                "has no equal here: capture the rows of the other run, and give them as "
                "`edits`: Replace(row, layer=…, positions=[…])",
            )
    row, position = fields.get("source_inline"), fields["dest_position"]
    if rows is None or not is_int(row) or row not in range(len(rows)):
        raise SpecError("source_inline", "expected the index of a row of `patch_vectors`")
    if not is_int(position) or position < 0:
        raise SpecError("dest_position", "expected an `int` from 0")
    with at("layer"):
        layer = read_int(fields["layer"])
        if layer < 0:
            raise SpecError("", "expected an `int` from 0")
    with at("hook"):
        site = Sites(read_site(fields["hook"]))
    if row not in vectors:
        vectors[int(row)] = Vector.parse(rows[row])
    alpha, where = fields.get("alpha", 1.0), [int(position)]
    return Replace(vectors[int(row)], layer, alpha, site=site, positions=where)
