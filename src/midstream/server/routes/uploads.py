"""Parser of vectors that clients upload."""

from __future__ import annotations

from typing import Any

from midstream.errors import HttpError, SpecError
from midstream.steering.files import LONE_KEY
from midstream.validation import kind, read_json

FILES = ("application/octet-stream", "application/safetensors", "application/x-safetensors")


def read_upload(body: bytes, content_type: str) -> Any:
    """Return uploaded vectors in a form that `VectorRegistry.register` takes.

    Args:
        body: JSON, or a safetensors file.
        content_type: content type of the body.

    Raises:
        SpecError: the body is malformed.
        HttpError: 415, the content type is unsupported.
    """
    given = content_type.partition(";")[0].strip().lower()
    if given in ("application/json", ""):
        return by_value(read_json(body))
    if given in FILES:
        return _read_file(body)
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

    try:
        tensors = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SpecError("", f"expected a safetensors file: {error}") from None
    return tensors[LONE_KEY] if set(tensors) == {LONE_KEY} else tensors
