"""Captured rows that are held: fetched, listed, deleted."""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from midstream.serving.answers import handle_of
from midstream.serving.held import Held
from midstream.serving.refusals import Refusal
from midstream.serving.routes.common import REFUSED, Here, Route, answered, refused

router = APIRouter(route_class=Route, tags=["midstream: activations"])
Name = Annotated[
    str,
    Path(
        alias="id",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="As an answer's `activations` has it.",
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
    summary="Rows that were captured, as a safetensors file",
    description="Byte ranges are served. The file has `{site}.{layer}`, with `.positions` and "
    "`.token_ids` beside it; of rows that a codec has reduced, its metadata name the codec.",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        206: {"content": {"application/octet-stream": {}}, "description": "A range of it."},
        **refused(400, 401, 404, 503),
        400: {**REFUSED[400], "content": {"text/plain": {}}},
        416: {"content": {"text/plain": {}}, "description": "There is no such range."},
    },
)
async def fetch(name: Name, server: Here) -> Response:
    found = server.holding.open(name)
    if found is None:
        raise _unknown(name)
    return _Rows(*found)


@router.delete(
    "/v1/midstream/activations/{id}",
    status_code=204,
    summary="Let go of captured rows",
    responses=refused(400, 401, 404, 503),
)
def delete(name: Name, server: Here) -> Response:
    if not server.holding.delete(name):
        raise _unknown(name)
    return Response(status_code=204)


@router.get(
    "/v1/midstream/captures",
    summary="The captured rows that are held for this client, oldest first",
    description="A client is who has one key or, on a server without keys, one address.",
    responses={**answered({"captures": [_HANDLE], "bytes": 11768}), **refused(401, 503)},
)
def captures(request: Request, server: Here) -> dict[str, Any]:
    mine = server.holding.of(server.client_of(request.scope))
    return {
        "captures": [{"request_id": held.request_id, **handle_of(held)} for held in mine],
        "bytes": sum(held.nbytes for held in mine),
    }


class _Rows(FileResponse):
    """A file by its descriptor, which is closed whatever becomes of the answer."""

    def __init__(self, held: Held, file: int) -> None:
        self._file = file
        super().__init__(
            f"/proc/self/fd/{file}",
            # Who may have them depends on more than the address, and they are soon gone.
            headers={"cache-control": "no-store"},
            media_type="application/octet-stream",
            filename=f"{held.id}.safetensors",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._file)


def _unknown(name: str) -> Refusal:
    return Refusal(404, f"no rows are held as {name!r}: they were deleted, or have expired", "id")
