"""Between the clients and vLLM's own endpoints: takes what is midstream's out of requests, and puts
what came of it on their answers.
"""

from __future__ import annotations

import functools
import json
from typing import Any, TypeGuard

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.config import KEY
from midstream.errors import MidstreamError, SpecError
from midstream.serving.exchange import CURRENT, Exchange
from midstream.serving.outgoing import Outgoing
from midstream.serving.refusals import Refusal
from midstream.serving.server import PATHS, Server
from midstream.serving.watched import Watched
from midstream.serving.wishes import take_wishes
from midstream.spec.fields import read_json

_MARK = f'"{KEY}"'.encode()
_ESCAPE = b"\\u00"
_WIDE = b"\0"  # of UTF-16 and UTF-32, which JSON's readers take as well
_DIGITS = 18  # of a length that there can be
_OWN = ("/v1/midstream", "/v1/steering")
_METRICS = "/metrics"


class Middleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                self._server.close()
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        refused = functools.partial(self._server.refused, scope)
        watched = Watched(send, refused)
        passed = watched if path.startswith(_OWN) else send
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            if path.rstrip("/") == _METRICS:
                await self._server.refresh_metrics()
            await self._app(scope, receive, passed)
            return
        try:
            body = await self._read(scope, receive)
            exchange, body = self._exchange(scope, body)
        except (Refusal, MidstreamError) as error:
            await refuse(Refusal.of(error), watched)
            return
        replayed = _Replay(body, receive)
        if exchange is None:
            await self._app(_with_length(scope, body), replayed, passed)
            return
        outgoing = Outgoing(exchange, self._server, watched, refused)
        token = CURRENT.set(exchange)
        try:
            await self._app(_with_length(scope, body), replayed, outgoing)
        finally:
            CURRENT.reset(token)
            await exchange.close(self._server.holding)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._server.settings.max_body_bytes
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > _DIGITS or int(length) > limit):
            raise _too_long(limit)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client left before its request was there")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_long(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _exchange(self, scope: Scope, body: bytes) -> tuple[Exchange | None, bytes]:
        """What a request asks of midstream, and its body without that; None: nothing."""
        path = path_of(scope)
        # Most requests do not have the word, which may be written with escapes: not looked into.
        if path.startswith(_OWN) or not any(each in body for each in (_MARK, _ESCAPE, _WIDE)):
            return None, body
        value = _asking(body)
        if value is None:
            return None, body
        if path not in PATHS:
            raise Refusal(
                400, f"midstream: {path} cannot answer with results; use {', '.join(PATHS)}", KEY
            )
        wishes = take_wishes(value)
        if wishes is None:
            return None, body
        if value.get("use_beam_search"):
            raise Refusal(400, "midstream: not with use_beam_search", KEY)
        if value.get("background"):
            raise Refusal(400, "midstream: not with background, which has no answer", KEY)
        exchange = self._server.begin(scope, value, wishes)
        try:
            return exchange, json.dumps(value).encode()
        except RecursionError:
            raise Refusal(400, "the JSON is nested too deeply") from None


def path_of(scope: Scope) -> str:
    """A request's path, as the app has it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _Replay:
    """A body that was read, as an application receives it; then what else comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message


def _asking(body: bytes) -> dict[str, Any] | None:
    """A body that speaks of midstream; None: it does not, or is not JSON, of which vLLM tells.

    Raises:
        SpecError: it does, and has a field twice or a number that JSON has not.
    """
    try:
        value = read_json(body)
    except SpecError:
        if _speaks(_loosely(body)):
            raise
        return None
    return value if _speaks(value) else None


def _speaks(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a body's JSON has the field, be it in `vllm_xargs`."""
    if not isinstance(value, dict):
        return False
    xargs = value.get("vllm_xargs")
    return KEY in value or isinstance(xargs, dict) and KEY in xargs


def _loosely(body: bytes) -> object:
    """As vLLM reads it; None: it cannot."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found


async def refuse(refusal: Refusal, send: Send) -> None:
    """Answers with a refusal."""
    content = refusal.content
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _with_length(scope: Scope, body: bytes) -> Scope:
    changed = {**scope, "headers": list(scope["headers"])}
    headers = MutableHeaders(raw=changed["headers"])
    if "content-length" in headers:
        headers["content-length"] = str(len(body))
    return changed


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"the body is longer than the {limit} bytes that this server takes")
