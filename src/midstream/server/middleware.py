"""ASGI middleware: takes the field `midstream` out of requests, and adds results to responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.compat.foreign_fields import check_body, names_in
from midstream.config.config import KEY
from midstream.errors import HttpError, MidstreamError, SpecError
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.server.body_values import body_fields, check_values, is_long
from midstream.server.guards.guarded_calls import ASKER
from midstream.server.http_errors import RefusalLogger, send_error
from midstream.server.open_requests import carry_id
from midstream.server.peers import CAPTURES, PEER
from midstream.server.request_field import MidstreamField, take_field
from midstream.server.response_writer import ResponseWriter
from midstream.server.server import PATHS, SWEEP, Server
from midstream.validation import encoded, read_json, read_json_members

_MARK = f'"{KEY}"'.encode()
_KEY_OF = re.compile(rb"%b\s*:" % _MARK)
_ESCAPE = b"\\u00"
_ESCAPES = b"\\u"
_WIDE = b"\0"  # occurs in UTF-16 and UTF-32, which JSON parsers accept as well
_SHORT = 1 << 16  # bytes of a body that is parsed in about a millisecond
_FLAT = 200  # brackets of a body whose depth no parser minds
_DIGITS = 18  # most digits of a plausible content length
_OWN = ("/v1/midstream", "/v1/steering", "/midstream")
_METRICS = "/metrics"
STEERING_HEADER = b"x-midstream-steering"
_WRITES = frozenset({"POST", "PUT", "PATCH"})
_FORM_FIELD = re.compile(rf'(?<![A-Za-z])(?i:name)="?{KEY}["\s;]'.encode())
_FORM_BYTES = len(f'name="{KEY}"') + 1  # of a match, and what is before it
_Writer = Callable[[dict[str, Any]], bytes]


class _Parsed(NamedTuple):
    """A body with the field `midstream`."""

    field: MidstreamField
    value: dict[str, Any]  # the body without it, and with the request's id
    id: str  # see `open_requests`
    body: bytes  # `value` as JSON


class Middleware:
    """ASGI middleware of one server."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._fields: dict[str, frozenset[str]] | None = None  # vLLM's, by path
        self._paths: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                return await self._app(scope, receive, send)
            finally:
                self._server.close()
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = path_of(scope)
        is_own = path.startswith(_OWN)
        ASKER.set(None if is_own else self._server.client_of(scope))
        # vLLM generates at more paths than those that can return results.
        if scope["method"] == "POST" and (path == SWEEP or not is_own):
            send = self._with_steering(send)
        observed = self._observer(scope, send) if is_own else send
        if scope["method"] not in _WRITES:
            if is_own:
                try:
                    self._server.check_host(Headers(scope=scope))
                except HttpError as error:
                    return await send_error(error, observed)
            if path.rstrip("/") == _METRICS:
                await self._server.refresh_metrics(scope)
            return await self._answer(path, scope, receive, observed)
        limit = self._server.settings.max_body_bytes
        is_read = self._is_read(scope, path)
        headers = dict(reversed(scope["headers"]))  # the first of a name counts
        is_form = is_read and headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        parsed: _Parsed | None = None
        try:
            length = headers.get(b"content-length", b"")
            if length.isdigit() and (len(length) > _DIGITS or int(length) > limit):
                raise _too_long(limit)
            if is_own:
                self._server.check_host(Headers(scope=scope))
            if is_read and not is_form:
                body = await _read(receive, limit)
                if parsed := await self._parsed(scope, path, body):
                    self._server.check_host(Headers(scope=scope))
                    request_field = await self._server.fill(scope, parsed.field)
                    context = self._server.begin(scope, parsed.value, request_field)
                    body = parsed.body
                    scope = _with_length(scope, body)
                receive = _Replay(body, receive)
        except (HttpError, MidstreamError) as error:
            return await send_error(HttpError.of(error), self._observer(scope, send))
        if parsed is None:
            incoming = _FormScan(receive, limit) if is_form else receive
            return await self._answer(path, scope, incoming, observed)
        on_error = partial(self._server.record_refusal, scope)
        observer = self._observer(scope, send)
        outgoing = ResponseWriter(context, self._server, observer, on_error)
        try:
            with self._server.open_requests.opened(parsed.id, context):
                await self._app(scope, receive, outgoing)
        except asyncio.CancelledError:
            # A disconnected client does not cancel: the server is being stopped.
            await outgoing.refuse(HttpError(503, "the server shuts down; try again later"))
            raise
        except Exception:
            # vLLM's handler of /v1/responses does not catch exceptions in the middle of a stream.
            refusal = context.refusal or context.failure
            if outgoing.is_stalled:
                on_error(408, None)
            elif refusal is None or not await outgoing.refuse(refusal):
                raise
        finally:
            await context.close(self._server.captures)

    def _observer(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that records refusals, as does a process that asks for a client."""
        on_error = partial(self._server.record_refusal, scope)
        return send if PEER in scope else RefusalLogger(send, on_error)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request without results: this process, or one of the others of this server."""
        peers = self._server.peers
        way = peers.way(scope, path) if peers is not None and path.startswith(_OWN) else None
        if way is None:
            return await self._app(scope, receive, send)
        try:
            if path.startswith(CAPTURES):
                scope["app"].state.midstream_guard.check(Headers(scope=scope))
            body = await _read(receive, self._server.settings.max_body_bytes)
            await way(partial(self._app, scope, _Replay(body, receive)), scope, body, send)
        except HttpError as error:
            await send_error(error, send)

    def _with_steering(self, send: Send) -> Send:
        """Return a `send` that names the server-wide steering in headers, if there is any."""
        steering = self._server.steering
        if steering is None:
            return send
        header = (STEERING_HEADER, steering.encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        return named

    def _is_read(self, scope: Scope, path: str) -> bool:
        """Return whether a path is of an endpoint, and not midstream's own, that reads a body."""
        if self._paths is None:
            self._paths = frozenset(PATHS) | {
                route.path
                for route in getattr(scope.get("app"), "routes", ())
                if _WRITES & set(getattr(route, "methods", None) or ())
                if not route.path.startswith(_OWN)
            }
        return path in self._paths

    async def _parsed(self, scope: Scope, path: str, body: bytes) -> _Parsed | None:
        if self._fields is None:
            self._fields = dict.fromkeys(PATHS, frozenset()) | body_fields(scope.get("app"))
        work = path, self._fields.get(path), body
        return await in_thread(_parse, *work) if is_long(body) else _parse(*work)


def _rejected(problem: str, name: str) -> HttpError:
    return HttpError(400, f"midstream: {problem}", name)


def path_of(scope: Scope) -> str:
    """Return a request's path without the application's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _read(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the client disconnected before its request was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_long(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _may_ask(body: bytes, fields: frozenset[str] | None) -> bool:
    """Return whether a body may have a key that concerns midstream."""
    if (first := body.find(_MARK)) >= 0 and _KEY_OF.search(body, first) is not None:
        return True
    return names_in(body, fields or ()) or _ESCAPE in body or _WIDE in body


def _parse(path: str, fields: frozenset[str] | None, body: bytes) -> _Parsed | None:
    """Return a body with the field `midstream`; None if absent. `fields`: vLLM's; None: any."""
    # Most bodies have no key that concerns midstream, not even escaped: they are not parsed.
    if not _may_ask(body, fields):
        return None
    is_named = _MARK in body
    if is_named:
        check_values(body, KEY)
    parsed = _parse_if_asked(body, fields)
    if parsed is None:
        return None
    value, written = parsed
    if _has_field(value):
        if not is_named:
            check_values(body, KEY)
        if path not in PATHS:
            raise _rejected(f"{path} cannot return results; use {', '.join(PATHS)}", KEY)
    request_field = take_field(value, fields or ())
    check_body(value, fields or ())
    if request_field is None:
        return None
    name = request_field.name
    if path not in PATHS:
        raise _rejected(f"{path} cannot return results; use {', '.join(PATHS)}", name)
    if value.get("use_beam_search"):
        raise _rejected("unsupported together with use_beam_search", name)
    if value.get("background"):
        raise _rejected("unsupported together with background, which returns no result", name)
    name = carry_id(value)
    try:
        return _Parsed(request_field, value, name, written(value))
    except RecursionError:
        raise HttpError(400, "the JSON is nested too deeply") from None


class _FormScan:
    """ASGI `receive` of a form, which ends with an error if the form has the field `midstream`."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0
        self._end = b""

    async def __call__(self) -> Message:
        message = await self._receive()
        part = message.get("body", b"")
        self._size += len(part)
        # FastAPI passes this exception on while it reads a form.
        if self._size > self._limit:
            raise HTTPException(413, _too_long(self._limit).message)
        joined = self._end + part
        # A match at byte 0 was searched for with the part before, together with its left neighbour.
        if _FORM_FIELD.search(joined, 1):
            raise HTTPException(
                400, f"{KEY}: a form cannot have this field; use {', '.join(PATHS)}"
            )
        self._end = joined[-_FORM_BYTES:]
        return message


class _Replay:
    """ASGI `receive` that returns a body that was already read, then all later messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message


def _parse_if_asked(
    body: bytes, fields: frozenset[str] | None
) -> tuple[dict[str, Any], _Writer] | None:
    """Return a body that concerns midstream, and its writer; None: it does not, or is no JSON."""
    write: _Writer = _dumped
    try:
        if len(body) <= _SHORT:
            value, write = _read_short(body)
        else:
            value, text, places = read_json_members(body)
            if isinstance(value, dict):
                write = partial(_written, before=dict(value), text=text, places=places)
    except SpecError:
        try:
            value = json.loads(
                body, object_pairs_hook=_asking
            )  # as leniently as vLLM, but for this
        except (ValueError, RecursionError):
            return None
        if _has_field(value):
            raise
    if not isinstance(value, dict):
        return None
    return (value, write) if fields is not None or _has_field(value) else None


def _read_short(body: bytes) -> tuple[object, _Writer]:
    """Return a short body's value, as `read_json` does, and its writer."""
    # msgspec takes a fifth of the time of Python's JSON. What it reads is what `read_json` reads if
    # no field occurs twice in an object: one would be lost, and with it a colon. It refuses numbers
    # that overflow, which only Python's writes, and takes deeper values than Python.
    if _ESCAPES not in body and body.count(b"[") + body.count(b"{") <= _FLAT:
        try:
            value = msgspec.json.decode(body)
            if msgspec.json.encode(value).count(b":") == body.count(b":"):
                return value, msgspec.json.encode
        except (msgspec.MsgspecError, RecursionError):
            pass
    return read_json(body), _dumped


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _written(
    value: dict[str, Any],
    before: Mapping[str, Any],
    text: str,
    places: Mapping[str, tuple[int, int]],
) -> bytes:
    """Return a body as JSON. Unchanged members keep their text: long ones take time to write."""
    parts: list[bytes] = []
    for name, member in value.items():
        parts.append(f"{', ' if parts else '{'}{json.dumps(name)}: ".encode())
        if name in places and before[name] is member:
            start, stop = places[name]
            parts += encoded(text, start, stop)
        else:
            parts.append(json.dumps(member).encode())
    return b"".join([*parts, b"}"] if parts else [b"{}"])


def _has_field(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a body's JSON has the field, at the top level or in `vllm_xargs`."""
    if not isinstance(value, dict):
        return False
    xargs = value.get("vllm_xargs")
    return KEY in value or isinstance(xargs, dict) and KEY in xargs


def _asking(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with each key's last value; of `vllm_xargs` the last that has the field."""
    return dict(pairs) | {name: value for name, value in pairs if _has_field({name: value})}


def _with_length(scope: Scope, body: bytes) -> Scope:
    length = str(len(body)).encode()
    headers = [
        (name, length if name == b"content-length" else value) for name, value in scope["headers"]
    ]
    return {**scope, "headers": headers}


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"the body exceeds this server's limit of {limit} bytes")
