"""Parser of server-sent events that passes unchanged events on byte for byte."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"
# An empty line; lines may end with \n or \r\n.
_END = re.compile(rb"\n\r?\n")
_LONGEST_END = 3
# The event that vLLM writes, which is nearly every one: a single field `data` on one line.
_PLAIN = re.compile(rb"data: ([^\r\n]*)\n\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    name: bytes  # field `event`; empty if absent
    data: bytes  # field `data`; empty for comments, and with other or repeated fields
    raw: bytes = b""  # the received bytes; empty for events created here

    @property
    def value(self) -> Any:
        """The data as JSON; None if it is not a JSON object."""
        if not self.data.startswith(b"{"):
            return None
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            return None

    def with_data(self, value: Any) -> Event:
        return Event(self.name, json.dumps(value).encode())

    @property
    def encoded(self) -> bytes:
        """The bytes to send: the received bytes if the event was received."""
        if self.raw:
            return self.raw
        name = b"event: " + self.name + b"\n" if self.name else b""
        return name + b"data: " + self.data + b"\n\n"


class Events:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that are complete after more bytes."""
        if not self._rest and (plain := _PLAIN.fullmatch(data)):
            return [Event(b"", plain[1], data)]
        # A large event arrives in many pieces: bytes that were searched are not searched again.
        start = max(0, len(self._rest) - _LONGEST_END)
        self._rest += data
        events, begin = [], 0
        while end := _END.search(self._rest, start):
            start = end.end()
            events.append(_read(bytes(self._rest[begin:start])))
            begin = start
        del self._rest[:begin]
        return events

    @property
    def rest(self) -> bytes:
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
