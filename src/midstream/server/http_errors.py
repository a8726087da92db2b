"""HTTP errors with the body of an OpenAI error: read, sent, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Message, Send

from midstream.errors import HttpError

# An error's body exceeds this only if it quotes the client's request.
_MOST = 1 << 16


def read_error(body: bytes) -> dict[str, Any] | None:
    """Parse the body of an OpenAI error, whose `error` is a dict; None if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_error = isinstance(value, dict) and isinstance(value.get("error"), dict)
    return value if is_error else None


async def send_error(refusal: HttpError, send: Send) -> None:
    await send_json(refusal.status, refusal.content, refusal.headers, send)


async def send_json(status: int, body: bytes, headers: Mapping[str, str], send: Send) -> None:
    own = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.encode(), value.encode()) for name, value in {**own, **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


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
                value = read_error(self._body)
                param = None if value is None else value["error"].get("param")
                self._on_error(self._status, param[:200] if isinstance(param, str) else None)
        await self._send(message)
