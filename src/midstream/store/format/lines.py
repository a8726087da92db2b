"""What a shard says of each of its requests: one line of JSON, and its metadata, another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError, StoreError
from midstream.store.format.entry import check_number, check_text
from midstream.store.format.layout import MAX_METADATA, MAX_POSITION, MAX_ROWS
from midstream.validation import read_fields, read_json

MAX_LINE = 1 << 20
MAX_CHILD = (1 << 31) - 1
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_FIELDS = ("id", "child", "tag", "prompt_tokens", "rows", "metadata")


@dataclass(frozen=True, slots=True)
class Line:
    """A request as a shard lists it.

    Attributes:
        request: its id.
        child: which of its completions.
        tag: as it was stored.
        prompt_tokens: how many tokens its prompt had.
        rows: (group, how many rows of it), for each group of taps that it has, ascending; these
            are the group's next rows after those of the requests before.
        metadata_bytes: length of its metadata, a line of JSON as well.
    """

    request: str
    child: int
    tag: str
    prompt_tokens: int
    rows: tuple[tuple[int, int], ...]
    metadata_bytes: int

    def emit(self) -> bytes:
        """The line, which `read_line` reads back, with its end."""
        return dump(
            {
                "id": self.request,
                "child": self.child,
                "tag": self.tag,
                "prompt_tokens": self.prompt_tokens,
                "rows": self.rows,
                "metadata": self.metadata_bytes,
            }
        )


def dump(value: object) -> bytes:
    """JSON in UTF-8, without spaces, with a line's end."""
    return (_ENCODER.encode(value) + "\n").encode()


def read_line(text: bytes) -> Line:
    """One line, without its end.

    Raises:
        StoreError: it is not what `Line.emit` writes.
    """
    if len(text) > MAX_LINE:
        raise StoreError(f"a request's line of {len(text)} bytes; it has at most {MAX_LINE}")
    try:
        found: dict[str, Any] = read_fields(read_json(text), _FIELDS)
    except SpecError as error:
        raise StoreError(f"a request's line: {error}") from None
    return Line(
        check_text("id", found["id"], least=1),
        check_number("child", found["child"], 0, MAX_CHILD),
        check_text("tag", found["tag"]),
        check_number("prompt_tokens", found["prompt_tokens"], 0, MAX_POSITION + 1),
        _read_rows(found["rows"]),
        check_number("metadata", found["metadata"], 3, MAX_METADATA),
    )


def emit_metadata(value: object) -> bytes:
    """A request's metadata as a line of JSON.

    Raises:
        StoreError: it is no dict, JSON cannot say it, or not so that it reads back.
    """
    if not isinstance(value, Mapping):
        raise StoreError(f"metadata: expected a dict, got `{type(value).__name__}`")
    try:
        text = dump(dict(value))
        read_metadata(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"metadata: {error}") from None
    return text


def read_metadata(text: bytes) -> dict[str, Any]:
    """A request's metadata.

    Raises:
        StoreError: it is not a JSON object, or too long.
    """
    if len(text) > MAX_METADATA:
        raise StoreError(f"metadata of {len(text)} bytes; a request has at most {MAX_METADATA}")
    try:
        found = read_json(text)
    except SpecError as error:
        raise StoreError(f"metadata: {error}") from None
    if not isinstance(found, dict):
        raise StoreError("metadata: expected a JSON object")
    return found


def _read_rows(value: object) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for pair in value if isinstance(value, list) else [value]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise StoreError("rows: expected a list of [group, rows]")
        group = check_number("rows: group", pair[0], found[-1][0] + 1 if found else 0, 10**6)
        found.append((group, check_number("rows", pair[1], 0, MAX_ROWS)))
    return tuple(found)
