"""Endpoints for cached captures: fetch, list, delete."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from midstream.errors import HttpError
from midstream.server.cached_rows.capture_cache import CachedCapture, CaptureCache
from midstream.server.peers import add_kept
from midstream.server.results_json import handle_of
from midstream.server.routes.common import (
    ERRORS,
    MidstreamRoute,
    ServerDep,
    error_responses,
    ok_response,
    send_within,
)

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: activations"])
Name = Annotated[
    str,
    Path(
        alias="id",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="The `id` in the `activations` of a response.",
        examples=["Yt3-2Wc0mUAF3mGf1g5n0ZJjzv0kq2aB"],
    ),
]

_HANDLE = {
    "request_id": "cmpl-8f4c",
    "format": "safetensors",
    "codec": "raw",
    "rows": {"resid_post.15": 5},
    "id": "Yt3-2Wc0mUAF3mGf1g5n0ZJjzv0kq2aB",
    "url": "/v1/midstream/activations/Yt3-2Wc0mUAF3mGf1g5n0ZJjzv0kq2aB",
    "bytes": 11768,
    "expires_at": 1700000600.0,
}


@router.get(
    "/v1/midstream/activations/{id}",
    summary="Fetch captured rows as a safetensors file",
    description="Byte ranges are supported. The file has tensors `{site}.{layer}`, "
    "`{site}.{layer}.positions` and `{site}.{layer}.token_ids`; its metadata name the codec.",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        206: {"content": {"application/octet-stream": {}}, "description": "A range of it."},
        **error_responses(400, 401, 404, 429, 503, 507),
        400: {**ERRORS[400], "content": {"text/plain": {}}},
        416: {"content": {"text/plain": {}}, "description": "The range is outside of the file."},
    },
)
async def fetch(name: Name, request: Request, server: ServerDep) -> Response:
    opened = await _open(server.captures, name, server.client_of(request.scope))
    if opened is not None and not server.owns(request.scope, opened[0]):
        server.captures.end_read(*opened)
        opened = None
    if opened is None:
        raise _unknown(name)
    return _Rows(server.captures, server.settings.stall_seconds, *opened)


@router.delete(
    "/v1/midstream/activations/{id}",
    status_code=204,
    summary="Delete captured rows",
    responses=error_responses(400, 401, 404, 503),
)
def delete(name: Name, request: Request, server: ServerDep) -> Response:
    cached = server.captures.get(name)
    is_own = cached is not None and server.owns(request.scope, cached)
    if not is_own or not server.captures.delete(name):
        raise _unknown(name)
    return Response(status_code=204)


@router.get(
    "/v1/midstream/captures",
    summary="List this client's cached captures, oldest first, and the server-wide captures",
    description="All callers that share an API key count as one client; on a server without keys, "
    "all callers that share an address.",
    responses=ok_response({"captures": [_HANDLE], "bytes": 11768, "server_wide": []}, 401, 503),
)
async def captures(request: Request, server: ServerDep) -> dict[str, Any]:
    mine = server.captures.of_client(server.client_of(request.scope))
    listing: dict[str, Any] = {
        "captures": [{"request_id": cached.request_id, **handle_of(cached)} for cached in mine],
        "bytes": sum(cached.nbytes for cached in mine),
        "server_wide": [capture.to_dict() for capture in server.llm.captures.list()],
    }
    if server.peers is not None:
        async for other in server.peers.each(request.scope):
            listing["captures"] += other["captures"]
            listing["bytes"] += other["bytes"]
            add_kept(listing["server_wide"], other["server_wide"])
        listing["captures"].sort(key=lambda capture: capture["expires_at"])
    return listing


async def _open(captures: CaptureCache, name: str, client: str) -> tuple[CachedCapture, int] | None:
    """Return what `captures.open` does, from a thread; if it is cancelled, no file stays open."""
    opening = asyncio.ensure_future(asyncio.to_thread(captures.open, name, client))

    def end(done: asyncio.Future[tuple[CachedCapture, int] | None]) -> None:
        if not done.cancelled() and done.exception() is None and (opened := done.result()):
            captures.end_read(*opened)

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(end)
        raise


class _Rows(FileResponse):
    """Response that sends a file by its descriptor, and closes it whatever the client does."""

    def __init__(
        self, captures: CaptureCache, stall_seconds: float, cached: CachedCapture, file: int
    ) -> None:
        self._captures, self._cached, self._file = captures, cached, file
        self._seconds = stall_seconds
        super().__init__(
            f"/proc/self/fd/{file}",
            # Access depends on more than the URL, and the rows expire soon.
            headers={"cache-control": "no-store"},
            media_type="application/octet-stream",
            filename=f"{cached.id}.safetensors",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_within(self._seconds, send, partial(super().__call__, scope, receive))
        finally:
            self._captures.end_read(self._cached, self._file)


def _unknown(name: str) -> HttpError:
    return HttpError(404, f"there are no rows {name!r}: they were deleted, or have expired", "id")
