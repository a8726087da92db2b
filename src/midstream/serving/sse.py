"""Server-sent events: cut out of a stream of bytes, read, and put back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"
# An empty line; lines may end as they do elsewhere.
_END = re.compile(rb"\n\r?\n")
_LONGEST_END = 3


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        name: of its kind; empty: it has none.
        data: what it says; empty of a comment, and of an event with other fields.
        raw: as it came; empty of one that is made here.
    """

    name: bytes
    data: bytes
    raw: bytes = b""

    @property
    def value(self) -> Any:
        """Its data as JSON; None where they are none."""
        if not self.data.startswith(b"{"):
            return None
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            return None

    def saying(self, value: Any) -> Event:
        """One of the same kind with other data."""
        return Event(self.name, json.dumps(value).encode())

    @property
    def written(self) -> bytes:
        """As it goes out: as it came, if it came from elsewhere."""
        if self.raw:
            return self.raw
        name = b"event: " + self.name + b"\n" if self.name else b""
        return name + b"data: " + self.data + b"\n\n"


class Events:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Event]:
        """The events that are whole now."""
        # An event of megabytes comes in many pieces: what was looked through is not again.
        start = max(0, len(self._rest) - _LONGEST_END)
        self._rest += data
        found, begin = [], 0
        while end := _END.search(self._rest, start):
            start = end.end()
            found.append(_read(bytes(self._rest[begin:start])))
            begin = start
        del self._rest[:begin]
        return found

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return bytes(self._rest)


def _read(raw: bytes) -> Event:
    name = data = b""
    for line in raw.split(b"\n"):
        field, _, value = line.removesuffix(b"\r").partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data" and not data:
            data = value
        elif field == b"event" and not name:
            name = value
        elif line.strip(b"\r"):
            return Event(b"", b"", raw)
    return Event(name, data, raw)
