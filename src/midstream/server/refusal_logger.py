"""ASGI `send` that reports error responses."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send

from midstream.server.http_errors import read_error

# An error's body exceeds this only if it quotes the client's request.
_MOST = 1 << 16


class RefusalLogger:
    """ASGI `send` that reports each error response by its status, and the invalid field or None."""

    def __init__(self, send: Send, on_error: Callable[[int, str | None], None]) -> None:
        self._send = send
        self._on_error = on_error
        self._status = 0
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body" and self._status >= 400:
            self._body += message.get("body", b"")[:_MOST]
            if not message.get("more_body", False):
                self._on_error(self._status, _param(self._body))
        await self._send(message)


def _param(body: bytes) -> str | None:
    """Return the field that an OpenAI error names; None if it names none."""
    value = read_error(body)
    param = None if value is None else value["error"].get("param")
    return param[:200] if isinstance(param, str) else None
