"""`MediaSpan`: where an image, audio or video is in a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from midstream.errors import SpecError
from midstream.validation import INT_LIMIT, show


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where an image, audio or video is in a prompt.

    Attributes:
        kind: "image", "audio" or "video".
        index: among the items of this kind, from 0, in the order of the prompt; see `Media`.
        first: position of the first token of its placeholder.
        length: tokens of its placeholder, with those that a model writes around and between the
            ones that `Media` selects, which hold its embeddings.
        hash: vLLM's hash of its content, or the `uuid` that the request gave it; empty: unknown.
            If vLLM caches neither prefixes nor media, it differs from request to request.
    """

    kind: str
    index: int
    first: int
    length: int
    hash: str = ""


def spans_to_json(spans: Iterable[MediaSpan]) -> list[dict[str, Any]]:
    return [asdict(span) for span in spans]


def read_spans(value: object) -> tuple[MediaSpan, ...]:
    """Return the spans of a JSON value, which may have further fields."""
    try:
        spans = msgspec.convert(value, tuple[MediaSpan, ...])
    except msgspec.ValidationError:
        spans = None
    if spans is None or not all(
        0 <= number <= INT_LIMIT
        for span in spans
        for number in (span.index, span.first, span.length)
    ):
        raise SpecError(
            "",
            f"media {show(str(value))}: expected a JSON list of objects with `kind`, `index`, "
            "`first` and `length`",
        )
    return spans
