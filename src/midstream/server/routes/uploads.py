"""Parser of vectors that clients upload."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from midstream.errors import HttpError, SpecError
from midstream.server.routes.request_body import content_type
from midstream.steering.files import read_control_vector
from midstream.steering.gguf import MAGIC
from midstream.steering.parse import LONE_WORDS
from midstream.validation import MAX_ITEMS, kind

FILES = ("application/octet-stream", "application/safetensors", "application/x-safetensors")

_HEADER_BYTES = 256  # at most, of one tensor in the header of a safetensors file


async def uploaded(request: Request) -> Any:
    """Return the vectors of a body, JSON or a file, as `VectorRegistry.register` takes them."""
    media_type = content_type(request)
    if media_type in ("application/json", ""):
        return by_value(await request.json())
    if media_type in FILES:
        body = await request.body()
        # Parsing megabytes would block the event loop.
        return await run_in_threadpool(read_file, body)
    raise HttpError(
        415, f"content-type: expected application/json or {FILES[0]}, got {media_type[:80]!r}"
    )


def read_file(body: bytes) -> Any:
    """Return the vectors of a safetensors file or a GGUF control vector."""
    # A safetensors file that began so would have a header of terabytes.
    return read_control_vector(body) if body[:4] == MAGIC else _read_safetensors(body)


def by_value(vectors: object) -> object:
    """Return vectors that are no path, which the registry would read from the server's files."""
    if not isinstance(vectors, (dict, list)):
        raise SpecError("vectors", f"expected an object or a list of numbers, got {kind(vectors)}")
    return vectors


def _read_safetensors(body: bytes) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    _check_header(body)
    try:
        tensors = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SpecError("", f"expected a safetensors file: {error}") from None
    is_alone = len(tensors) == 1 and set(tensors) <= set(LONE_WORDS)
    return next(iter(tensors.values())) if is_alone else tensors


def _check_header(body: bytes) -> None:
    """Check the number of tensors before the file is loaded, which takes time for each."""
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
