"""The file of a probe: safetensors whose header has its JSON form; vectors in it are tensors."""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from midstream.errors import SpecError
from midstream.plan.probe_files.info import ProbeInfo
from midstream.validation import (
    at,
    check_regular,
    check_suffix,
    kind,
    read_fields,
    read_json,
    read_json_text,
    show,
)

SUFFIX = ".safetensors"
KEY, VERSION = "midstream.probe", 1
# A network of 256 rows, 65,536 wide, is 64 MiB.
MAX_FILE_BYTES, MAX_HEADER_BYTES = 256 << 20, 1 << 20
_LENGTH = 8  # bytes of the header's length, little-endian, before the header
_MAX_DEPTH = 32
_FIELDS = ("version", "probe", "info")

Replaced = Callable[[Mapping[str, Any], str], object]
"""What replaces an object of a JSON form at a path; None: nothing does."""


def write(form: Mapping[str, Any], info: ProbeInfo | None, path: str | os.PathLike[str]) -> None:
    """Write a probe's JSON form and what is known of it; the file appears by a rename."""
    from safetensors.numpy import save

    name = check_suffix(path, SUFFIX)
    outline, tensors = split(form)
    known = None if info is None else info.to_dict()
    text = json.dumps({"version": VERSION, "probe": outline, "info": known}, allow_nan=False)
    data = save(tensors, {KEY: text})
    # What could not be read is not written.
    length = int.from_bytes(data[:_LENGTH], "little")
    _check_bytes("header", length, MAX_HEADER_BYTES)
    _check_bytes("file", len(data), MAX_FILE_BYTES)
    part = f"{name}.{uuid.uuid4().hex}.part"
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def split(form: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a JSON form with `{"tensor": path}` for each array in it, and the arrays by path."""
    import numpy as np

    tensors: dict[str, Any] = {}

    def as_tensor(value: Mapping[str, Any], path: str) -> object:
        if "f32" not in value:
            return None
        array = np.frombuffer(base64.b64decode(value["f32"]), "<f4")
        tensors[path] = array.reshape(value["shape"]) if "shape" in value else array
        return {"tensor": path}

    return _mapped(form, as_tensor), tensors


def read(path: str | os.PathLike[str]) -> tuple[Any, ProbeInfo | None]:
    """Read what `write` wrote: the JSON form with arrays in it, and what is known of the probe.

    Raises:
        SpecError: the file is missing, damaged, too long or of another kind.
    """
    try:
        _check_bytes("file", check_regular(path).st_size, MAX_FILE_BYTES)
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError("", f"it cannot be read: {error}") from None
    parts, tensors = _read_parts(data)
    used: set[str] = set()

    def of_tensor(value: Mapping[str, Any], path: str) -> object:
        if "tensor" not in value:
            return None
        if len(value) != 1 or value["tensor"] != path or path not in tensors:
            raise SpecError(f"probe.{path}", "expected the tensor of this name in the file")
        used.add(path)
        return tensors[path]

    form = _mapped(parts["probe"], of_tensor)
    if used != set(tensors):
        (extra, *_) = sorted(set(tensors) - used)
        raise SpecError("", f"the tensor {show(extra)} is no part of the probe")
    with at("info"):
        return form, None if parts["info"] is None else ProbeInfo.parse(parts["info"])


def _read_parts(data: bytes) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the metadata and the tensors, float32, of a file's bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH + length and length <= MAX_HEADER_BYTES:
        raise SpecError("", "not a safetensors file, or cut short")
    _check_bytes("header", length, MAX_HEADER_BYTES)
    with at("header"):
        header = read_json(data[_LENGTH : _LENGTH + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    if not isinstance(header, dict) or not isinstance(text, str):
        raise SpecError("", f"not the file of a probe: it has no metadata {KEY!r}; see Probe.save")
    for key, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if key != "__metadata__" and dtype != "F32":
            raise SpecError(f"tensor {show(key)}", f"expected dtype F32, got {show(dtype)}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise SpecError("", f"not a safetensors file, or damaged: {error}") from None
    with at("metadata"):
        parts = read_fields(read_json_text(text), required=_FIELDS)
        if parts["version"] != VERSION:
            raise SpecError("version", f"expected {VERSION}, got {show(parts['version'])}")
        if not isinstance(parts["probe"], dict):
            raise SpecError("probe", f"expected an object, got {kind(parts['probe'])}")
    return parts, tensors


def _mapped(value: Any, replaced: Replaced, path: str = "", depth: int = 0) -> Any:
    """Return a JSON value with some of its objects replaced."""
    if depth > _MAX_DEPTH:
        raise SpecError("probe", f"expected at most {_MAX_DEPTH} levels")
    start = f"{path}." if path else ""
    if isinstance(value, Mapping):
        other = replaced(value, path)
        if other is not None:
            return other
        return {
            name: _mapped(part, replaced, start + name, depth + 1) for name, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            _mapped(part, replaced, f"{start}{index}", depth + 1)
            for index, part in enumerate(value)
        ]
    return value


def _check_bytes(what: str, count: int, most: int) -> None:
    if count > most:
        raise SpecError("", f"a {what} of {count} bytes; expected at most {most}")
