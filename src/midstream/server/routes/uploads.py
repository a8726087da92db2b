"""Parser of vectors that clients upload."""

from __future__ import annotations

import json
from typing import Any

from midstream.errors import HttpError, SpecError
from midstream.steering.files import LONE_KEY, read_control_vector
from midstream.steering.gguf import MAGIC
from midstream.validation import MAX_ITEMS, kind, read_json

FILES = ("application/octet-stream", "application/safetensors", "application/x-safetensors")

_HEADER_BYTES = 256  # at most, of one tensor in the header of a safetensors file


def read_upload(body: bytes, content_type: str) -> Any:
    """Return uploaded vectors in a form that `VectorRegistry.register` takes.

    Args:
        body: JSON, a safetensors file, or a GGUF control vector.
        content_type: content type of the body.

    Raises:
        SpecError: the body is malformed.
        HttpError: 415, the content type is unsupported.
    """
    given = content_type.partition(";")[0].strip().lower()
    if given in ("application/json", ""):
        return by_value(read_json(body))
    if given in FILES:
        # A safetensors file that began so would have a header of terabytes.
        return read_control_vector(body) if body[:4] == MAGIC else _read_file(body)
    raise HttpError(
        415, f"content-type: expected application/json or {FILES[0]}, got {given[:80]!r}"
    )


def by_value(vectors: object) -> object:
    """Return the vectors after checking that they are not a path, which the registry would read
    from the server's file system.

    Raises:
        SpecError: they are not an object or a list.
    """
    if not isinstance(vectors, (dict, list)):
        raise SpecError("vectors", f"expected an object or a list of numbers, got {kind(vectors)}")
    return vectors


def _read_file(body: bytes) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    _check_header(body)
    try:
        tensors = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SpecError("", f"expected a safetensors file: {error}") from None
    return tensors[LONE_KEY] if set(tensors) == {LONE_KEY} else tensors


def _check_header(body: bytes) -> None:
    """Check the number of tensors before the file is loaded, which takes time for each.

    Raises:
        SpecError: there are too many. Other faults are left to the loader.
    """
    length = int.from_bytes(body[:8], "little")
    too_many = SpecError("", f"expected a safetensors file of at most {MAX_ITEMS} tensors")
    if length > MAX_ITEMS * _HEADER_BYTES:
        raise too_many
    try:
        header = json.loads(body[8 : 8 + length])
    except (ValueError, RecursionError):
        return
    if isinstance(header, dict) and len(header) > MAX_ITEMS + 1:  # and its metadata
        raise too_many
