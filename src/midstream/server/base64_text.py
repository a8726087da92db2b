"""Bytes in JSON, as base64 that is copied once, as a copy takes longer than encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pybase64

# In JSON a string has no such byte.
_PLACE = b"\0"
_QUOTED = msgspec.Raw(b'"%b"' % _PLACE)


class Base64Text:
    """Base64 of bytes, as a JSON value for `dump`."""

    __slots__ = ("pieces",)

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self.pieces = [pybase64.b64encode(part) for part in _in_threes(parts)]


def dump(value: Any) -> list[bytes]:
    """Return a value, which may contain `Base64Text`, as pieces of JSON, one after the other."""
    texts: list[Base64Text] = []

    def place_of(unencoded: Any) -> msgspec.Raw:
        if not isinstance(unencoded, Base64Text):
            raise TypeError(f"not a JSON value: {type(unencoded).__name__}")
        texts.append(unencoded)
        return _QUOTED

    first, *others = msgspec.json.encode(value, enc_hook=place_of).split(_PLACE)
    pieces = [first]
    for text, after in zip(texts, others, strict=True):
        pieces += [*text.pieces, after]
    return pieces


def _in_threes(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in parts of whole groups of three, but for the last."""
    left = b""
    for part in parts:
        begin = min(-len(left) % 3, len(part))
        left += part[:begin]
        end = begin + (len(part) - begin) // 3 * 3
        if left and len(left) % 3 == 0:
            yield left
            left = b""
        if begin < end:
            yield part[begin:end]
        left += part[end:]
    yield left
