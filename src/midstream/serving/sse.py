"""Server-sent events, as vLLM writes them: cut out of a stream of bytes, read, and put back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

DONE = b"[DONE]"
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        name: of its kind; empty: it has none.
        data: what it says.
        raw: as it came, if it is not to be changed: a comment, or something with other fields.
    """

    name: bytes
    data: bytes
    raw: bytes = b""

    @property
    def value(self) -> Any:
        """Its data as JSON; None where they are none."""
        if self.raw or not self.data.startswith(b"{"):
            return None
        try:
            return json.loads(self.data)
        except ValueError:
            return None

    def saying(self, value: Any) -> Event:
        """The same with other data."""
        return replace(self, data=json.dumps(value, ensure_ascii=False).encode())

    @property
    def written(self) -> bytes:
        """As it goes out."""
        if self.raw:
            return self.raw
        name = b"event: " + self.name + b"\n" if self.name else b""
        return name + b"data: " + self.data + _END


class Events:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are whole now."""
        *whole, self._rest = (self._rest + data).split(_END)
        for text in whole:
            yield _read(text)

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest


def _read(text: bytes) -> Event:
    name = data = b""
    for line in text.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data" and not data:
            data = value
        elif field == b"event" and not name:
            name = value
        else:
            return Event(b"", b"", text + _END)
    return Event(name, data)
