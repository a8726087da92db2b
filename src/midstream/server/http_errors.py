"""HTTP errors with the body of an OpenAI error: read and sent."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Send

from midstream.errors import HttpError


def read_error(body: bytes) -> dict[str, Any] | None:
    """Parse the body of an OpenAI error, whose `error` is a dict; None if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_error = isinstance(value, dict) and isinstance(value.get("error"), dict)
    return value if is_error else None


async def send_error(refusal: HttpError, send: Send) -> None:
    """Send an error response."""
    content = refusal.content
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **refusal.headers,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
