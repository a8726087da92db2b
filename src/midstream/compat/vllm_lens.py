"""vllm-lens's `extra_args` and `vllm_xargs`, translated into a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.compat.packed_arrays import check_compressed, read_array
from midstream.errors import SpecError
from midstream.plan import Capture, Edit, Plan, Steer
from midstream.validation import MAX_PARTS, at, is_int, kind, read_fields, read_json_text

FIELDS = ("output_residual_stream", "apply_steering_vectors")
_VECTOR = ("activations", "layer_indices", "scale", "norm_match", "position_indices")
_ARRAY = ("dtype", "original_dtype", "shape", "compression")


def read_plan(fields: Mapping[str, object]) -> Plan:
    """Return the plan of vllm-lens's fields, or of JSON text of them."""
    captures: tuple[Capture, ...] = ()
    edits: list[Edit] = []
    for name, value in fields.items():
        with at(name):
            if isinstance(value, str):
                value = read_json_text(value)
            if name == "output_residual_stream":
                captures = (_read_capture(value),)
            else:
                edits = _read_vectors(value)
    return Plan(captures, tuple(edits))


def _read_capture(value: object) -> Capture:
    if value is True:
        return Capture("all")
    return Capture(_read_indices(value, "layers, or true"))


def _read_vectors(value: object) -> list[Edit]:
    if not isinstance(value, (list, tuple)) or not value:
        raise SpecError("", f"expected a list of SteeringVector, got {kind(value)}")
    check_compressed(item.get("activations") for item in value if isinstance(item, Mapping))
    edits: list[Edit] = []
    for index, vector in enumerate(value):
        with at(f"[{index}]"):
            edits += _read_vector(vector)
        if len(edits) > MAX_PARTS:
            raise SpecError("", f"expected at most {MAX_PARTS} pairs of layer and position")
    return edits


def _read_vector(value: object) -> list[Edit]:
    if not isinstance(value, Mapping):
        value = {name: getattr(value, name) for name in _VECTOR if hasattr(value, name)}
    fields = read_fields(value, required=_VECTOR[:2], optional=_VECTOR[2:])
    with at("layer_indices"):
        layers = _read_indices(fields["layer_indices"], "layers")
        if len(set(layers)) < len(layers):
            raise SpecError("", "a layer is listed twice")
    with at("activations"):
        rows = _read_rows(fields["activations"])
        if len(rows) != len(layers):
            raise SpecError("", f"expected {len(layers)} rows, one for each layer, got {len(rows)}")
    matched = fields.get("norm_match", False)
    if not isinstance(matched, bool):
        raise SpecError("norm_match", f"expected `bool`, got {kind(matched)}")
    how: dict[str, Any] = {
        "scale": fields.get("scale", 1.0), "norm": "match" if matched else None
    }  # fmt: skip
    positions = fields.get("position_indices")
    if rows.ndim == 2:
        if positions is not None:
            raise SpecError(
                "position_indices", "expected `activations` of three dimensions with it"
            )
        return [Steer(row, layer, **how) for row, layer in zip(rows, layers, strict=True)]
    with at("position_indices"):
        where = list(range(rows.shape[1])) if positions is None else _read_indices(
            positions, "positions"
        )  # fmt: skip
        if len(where) != rows.shape[1]:
            raise SpecError("", f"expected {rows.shape[1]} positions, got {len(where)}")
    if rows.shape[0] * rows.shape[1] > MAX_PARTS:
        raise SpecError("", f"expected at most {MAX_PARTS} pairs of layer and position")
    return [
        Steer(row, layer, positions=position, **how)
        for layer, own in zip(layers, rows, strict=True)
        for position, row in zip(where, own, strict=True)
    ]


def _read_rows(value: object) -> Any:
    """Return activations as an array [layers, width] or [layers, positions, width]."""
    if isinstance(value, Mapping):
        fields = read_fields(value, required=("data",), optional=_ARRAY)
        dtype = fields.get("dtype", "float32")
        if dtype == "int16" and fields.get("original_dtype") == "torch.bfloat16":
            dtype = "bfloat16"  # which NumPy lacks
        rows: Any = read_array(
            fields["data"], fields.get("shape"), dtype, fields.get("compression")
        )
    elif hasattr(value, "detach") and hasattr(value, "dim"):
        rows = value.detach().cpu().float().numpy()
    elif hasattr(value, "__array_interface__"):
        rows = value
    else:
        raise SpecError(
            "", f"expected an array, or a dict with `data` in base64, got {kind(value)}"
        )
    if rows.ndim not in (2, 3):
        raise SpecError("", f"expected two or three dimensions, got {rows.ndim}")
    return rows


def _read_indices(value: object, what: str) -> list[int]:
    if not isinstance(value, (list, tuple)) or not value:
        raise SpecError("", f"expected a list of {what}, got {kind(value)}")
    for index, number in enumerate(value):
        if not is_int(number) or number < 0:
            raise SpecError(
                f"[{index}]", "expected an `int` from 0: vllm-lens counts from the start"
            )
    return [int(element) for element in value]
