"""Answers on their way out, of which those that refuse are noted."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send

from midstream.serving.refusals import read_error

# A refusal's body is longer only where it repeats what a client wrote.
_MOST = 1 << 16


class Watched:
    """Takes the place of an application's `send`."""

    def __init__(self, send: Send, refused: Callable[[int, str | None], None]) -> None:
        """Args:
        send: where messages go.
        refused: is told the status of a refusal, and the field that is wrong, if it names one.
        """
        self._send = send
        self._refused = refused
        self._status = 0
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body" and self._status >= 400:
            self._body += message.get("body", b"")[:_MOST]
            if not message.get("more_body", False):
                self._refused(self._status, _param(self._body))
        await self._send(message)


def _param(body: bytes) -> str | None:
    """The field that an OpenAI error names."""
    value = read_error(body)
    param = None if value is None else value["error"].get("param")
    return param[:200] if isinstance(param, str) else None
