"""One request to an app, as an ASGI server makes it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from support.serving_fake import scope_of


async def raw_request(
    app: Any,
    parts: Sequence[bytes] = (b"",),
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    length: str | None = None,
    stays: bool = False,
    reads: int | None = None,
) -> tuple[list[Any], int]:
    """Return the messages of the answer, and how many parts of the body were taken.

    Args:
        parts: of the body; after them the client has gone, or `stays` without a word.
        length: what its header says of its body.
        reads: after so many messages the client reads nothing for a minute; None: all.
    """
    sent: list[Any] = []
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
        if stays:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == reads:
            await asyncio.sleep(60)

    scope = {**scope_of(length), "method": method, "path": path, "raw_path": path.encode()}
    await app(scope, receive, send)
    return sent, len(parts) - len(left)


def body_of(sent: Sequence[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent[1:])
