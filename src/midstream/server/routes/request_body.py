"""Bodies of midstream's own routes: the only way in which a route reads one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import HTTPException, Request

from midstream.errors import HttpError, SpecError
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.server.body_values import check_values, is_long
from midstream.server.server import Server
from midstream.validation import read_json_members


class StrictRequest(Request):
    """Request, also for FastAPI, with limits and strict JSON: no duplicate keys, no NaN."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        server: Server = self.app.state.midstream
        limit, size = server.settings.max_body_bytes, 0
        async for part in super().stream():
            size += len(part)
            if size > limit:
                problem = f"the body exceeds this server's limit of {limit} bytes"
                raise _refused(HttpError(413, problem))
            yield part

    async def json(self) -> Any:
        """Return the JSON of the body; HTTPException, 413 or 400: too large, or malformed."""
        data = await self.body()
        try:
            if is_long(data):
                return await in_thread(_read, data)
            return _read(data)
        except (HttpError, SpecError) as error:
            raise _refused(HttpError.of(error)) from None


async def json_of(request: Request) -> Any:
    """Return the JSON of a body, as `StrictRequest.json`; HttpError, 415: another content type."""
    if content_type(request) != "application/json":
        raise HttpError(415, "expected content type application/json")
    return await request.json()


def content_type(request: Request) -> str:
    """Return the content type of a body without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _read(data: bytes) -> object:
    """Return the JSON of a body, whose values are counted first."""
    check_values(data)
    value, _, _ = read_json_members(data)
    return value


def _refused(refusal: HttpError) -> HTTPException:
    """Return the exception for a refusal. FastAPI, which reads bodies, passes no other one on."""
    return HTTPException(refusal.status, refusal)
