"""Files of directions: safetensors with midpoints and scores, GGUF; and repeng's vectors."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit.scores import ERRORS, SCORES, LayerScore
from midstream.plan.vectors.matrix import Matrix
from midstream.plan.vectors.vector import Vector
from midstream.steering.files import read_file
from midstream.steering.gguf import read_gguf
from midstream.steering.parse import DEFAULT_SITE, Placed
from midstream.validation import (
    at,
    check_suffix,
    is_int,
    kind,
    read_fields,
    read_float32,
    read_int,
    read_json,
    show,
)

if TYPE_CHECKING:
    from midstream.lab.fit.direction_set import DirectionSet

KEY, VERSION = "midstream.directions", 1
ARCHITECTURE = "controlvector"
_HINT = f"{ARCHITECTURE}.model_hint"
_SUFFIX = ".safetensors"
_FIELDS = ("version", "method", "num_folds", "model_type", "midpoints", "scores")
_MAX_METADATA = 64 << 20

Loaded = tuple[
    NDArray[np.float32],
    tuple[int, ...],
    Any,  # the site
    "NDArray[np.float32] | None",
    dict[int, LayerScore],
    str,
    int,
    str,
]
"""The fields of `Directions`, in their order."""


def save(directions: DirectionSet, path: str | os.PathLike[str]) -> None:
    """Write directions to a safetensors file; see `Directions.save`."""
    from safetensors.numpy import save as to_bytes

    name = check_suffix(path, _SUFFIX)
    tensors = {f"{directions.site}.{direction.layer}": direction.vector for direction in directions}
    midpoints = {
        str(direction.layer): Vector.parse(direction.midpoint).emit()
        for direction in directions
        if direction.midpoint is not None
    }
    extra = {
        "version": VERSION,
        "method": directions.method,
        "num_folds": directions.num_folds,
        "model_type": directions.model_type,
        "midpoints": midpoints,
        "scores": {
            str(layer): [getattr(score, name) for name in (*SCORES, *ERRORS)]
            for layer, score in directions.scores.items()
        },
    }
    data = to_bytes(tensors, {KEY: json.dumps(extra, allow_nan=False)})
    _write(name, lambda part: Path(part).write_bytes(data))


def load(path: str | os.PathLike[str]) -> Loaded:
    """Read directions of a file; see `Directions.load`."""
    with at("path"):
        placed = read_file(path)
        if isinstance(placed, Vector):
            raise SpecError("", f"{os.fspath(path)}: its vector has no layer")
        loaded = _placed(placed)
        name = os.fspath(path)
        extra = _metadata(name) if os.path.splitext(name)[1].lower() == _SUFFIX else None
        if extra is None:
            return loaded
        try:
            with at("metadata"):
                return _with_metadata(loaded, extra)
        except SpecError as error:
            raise SpecError("", f"{name}: {error}") from None


def load_gguf(path: str | os.PathLike[str]) -> Loaded:
    """Read directions of a GGUF control vector; see `Directions.from_gguf`."""
    name = check_suffix(path, ".gguf")
    *fields, _ = load(name)
    with open(name, "rb") as file:
        hint = read_gguf(file.read()).metadata.get(_HINT, "")
    return (*fields, hint if isinstance(hint, str) else "")


def check_site(site: str) -> None:
    """Check that directions are of the site that control vectors are added to."""
    if site != DEFAULT_SITE:
        raise SpecError("site", f"control vectors are of {DEFAULT_SITE}; these are of {site}")


def write_gguf(
    site: str, vectors: Mapping[int, NDArray[np.float32]], path: str | os.PathLike[str], hint: str
) -> None:
    """Write vectors by layer to a GGUF control vector; see `Directions.to_gguf`."""
    name = check_suffix(path, ".gguf")
    check_site(site)
    written = {layer: vector for layer, vector in vectors.items() if layer}
    if not written:
        raise SpecError(
            "layers",
            "llama.cpp counts layers from 0 and steers the output of layers 1 and up: a control "
            "vector has no layer 0, the only one here",
        )
    MissingExtraError.require("gguf", "to_gguf")
    if len(written) < len(vectors):
        warnings.warn(
            f"{name}: layer 0 is left out: llama.cpp counts layers from 0 and steers the output of "
            "layers 1 and up, so a control vector has no direction.0",
            stacklevel=3,
        )
    import gguf

    def write(part: str) -> None:
        writer = gguf.GGUFWriter(part, ARCHITECTURE)
        writer.add_string(_HINT, hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(written))
        for layer, vector in written.items():
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(vector, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    _write(name, write)


def of_repeng(control_vector: Any) -> Loaded:
    """Read repeng's `ControlVector`; see `Directions.from_repeng`."""
    vectors = getattr(control_vector, "directions", None)
    if not isinstance(vectors, Mapping) or not vectors:
        raise SpecError(
            "control_vector",
            "expected an object with `directions`, {layer: vector}, and `model_type`, got "
            f"{kind(control_vector)}",
        )
    placed = []
    with at("control_vector.directions"):
        for layer, vector in vectors.items():
            with at(f"[{layer!r}]"):
                if not is_int(layer) or layer < 0:
                    raise SpecError("", "expected a layer from 0, `int`")
                placed.append(Placed("", DEFAULT_SITE, int(layer), Vector.parse(vector)))
        *fields, _ = _placed(placed)
    return (*fields, str(getattr(control_vector, "model_type", "")))


def _placed(placed: Any) -> Loaded:
    """Return the fields of directions of vectors by tap."""
    sites = sorted({place.site for place in placed})
    if len(sites) > 1:
        raise SpecError("", f"expected vectors of one site, got {', '.join(sites)}")
    by_layer: dict[int, NDArray[np.float32]] = {}
    for placed_vector in sorted(placed, key=lambda place: int(place.layer)):
        if isinstance(placed_vector.vector, Matrix) or placed_vector.layer < 0:
            raise SpecError(placed_vector.path, "expected a vector of a layer from 0")
        by_layer[placed_vector.layer] = placed_vector.vector.numpy()
    if len({len(vector) for vector in by_layer.values()}) > 1:
        raise SpecError("", "expected vectors of one width")
    return np.stack(list(by_layer.values())), tuple(by_layer), sites[0], None, {}, "", 0, ""


def _metadata(name: str) -> str | None:
    """Return the JSON of a file that `save` wrote; None of another file."""
    from safetensors import safe_open

    with safe_open(name, framework="numpy") as file:
        text = (file.metadata() or {}).get(KEY)
    if text is not None and len(text) > _MAX_METADATA:
        raise SpecError("", f"{name}: metadata of {len(text)} bytes; at most {_MAX_METADATA}")
    return text


def _with_metadata(loaded: Loaded, text: str) -> Loaded:
    vectors, layers, site, *_ = loaded
    fields = read_fields(read_json(text), required=_FIELDS)
    if fields["version"] != VERSION:
        raise SpecError("version", f"expected {VERSION}, got {show(str(fields['version']))}")
    for field in ("method", "model_type"):
        if not isinstance(fields[field], str):
            raise SpecError(field, f"expected `str`, got {kind(fields[field])}")
    with at("num_folds"):
        num_folds = read_int(fields["num_folds"])
    midpoints = None
    if fields["midpoints"]:
        rows = _by_layer("midpoints", fields["midpoints"], layers, Vector.parse)
        if set(rows) != set(layers) or any(row.size != vectors.shape[1] for row in rows.values()):
            raise SpecError("midpoints", "expected one of the vectors' width at each layer")
        midpoints = np.stack([rows[layer].numpy() for layer in layers])
    scores = _by_layer("scores", fields["scores"], layers, _read_score)
    return (
        vectors, layers, site, midpoints, scores, fields["method"], num_folds, fields["model_type"],
    )  # fmt: skip


def _by_layer(
    field: str, value: object, layers: tuple[int, ...], read: Callable[[Any], Any]
) -> dict[int, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(field, f"expected an object by layer, got {kind(value)}")
    known = {str(layer): layer for layer in layers}
    values = {}
    for key, json_value in value.items():
        with at(f"{field}[{show(str(key))}]"):
            if key not in known:
                raise SpecError("", "the file has no vector of this layer")
            values[known[key]] = read(json_value)
    return values


def _read_score(value: object) -> LayerScore:
    # Files of earlier releases have no errors.
    if not isinstance(value, list) or len(value) not in (3, 6):
        raise SpecError("", f"expected [{', '.join((*SCORES, *ERRORS))}]")
    scores = map(read_float32, value[:3])
    return LayerScore(*scores, *(n if n is None else read_float32(n) for n in value[3:]))


def _write(name: str, write: Callable[[str], object]) -> None:
    """Have a file written under another name, and rename it."""
    part = f"{name}.{uuid.uuid4().hex}.part"
    try:
        write(part)
        os.replace(part, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
