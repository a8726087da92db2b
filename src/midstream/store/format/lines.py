"""JSON lines of a shard: for each completion its index line and its metadata."""

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
    """One completion in a shard's list of requests."""

    request: str
    child: int  # index of the completion
    tag: str
    prompt_tokens: int
    rows: tuple[tuple[int, int], ...]  # (group, number), after those of earlier lines
    metadata_bytes: int  # its metadata is also a line of JSON

    def emit(self) -> bytes:
        """Return the line with its newline; `read_line` parses it."""
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
    return (_ENCODER.encode(value) + "\n").encode()


def read_line(text: bytes) -> Line:
    """Parse one line, without its newline."""
    if len(text) > MAX_LINE:
        raise StoreError(f"a request's line of {len(text)} bytes; the limit is {MAX_LINE}")
    try:
        fields: dict[str, Any] = read_fields(read_json(text), _FIELDS)
    except SpecError as error:
        raise StoreError(f"a request's line: {error}") from None
    return Line(
        check_text("id", fields["id"], least=1),
        check_number("child", fields["child"], 0, MAX_CHILD),
        check_text("tag", fields["tag"]),
        check_number("prompt_tokens", fields["prompt_tokens"], 0, MAX_POSITION + 1),
        _read_rows(fields["rows"]),
        check_number("metadata", fields["metadata"], 3, MAX_METADATA),
    )


def emit_metadata(value: object) -> bytes:
    if not isinstance(value, Mapping):
        raise StoreError(f"metadata: expected a dict, got `{type(value).__name__}`")
    try:
        text = dump(dict(value))
        read_metadata(text)
    except StoreError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"metadata: {error}") from None
    return text


def read_metadata(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_METADATA:
        raise StoreError(f"metadata of {len(text)} bytes; the limit is {MAX_METADATA}")
    try:
        metadata = read_json(text)
    except SpecError as error:
        raise StoreError(f"metadata: {error}") from None
    if not isinstance(metadata, dict):
        raise StoreError("metadata: expected a JSON object")
    return metadata


def _read_rows(value: object) -> tuple[tuple[int, int], ...]:
    counts: list[tuple[int, int]] = []
    for pair in value if isinstance(value, list) else [value]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise StoreError("rows: expected a list of [group, rows]")
        group = check_number("rows: group", pair[0], counts[-1][0] + 1 if counts else 0, 10**6)
        counts.append((group, check_number("rows", pair[1], 0, MAX_ROWS)))
    return tuple(counts)
