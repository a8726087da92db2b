"""Endpoint for parameters of the model."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Response
from safetensors.torch import save
from starlette.types import Receive, Scope, Send

from midstream.deadlines import within
from midstream.errors import HttpError
from midstream.server.routes.common import MidstreamRoute, ServerDep, error_responses, send_within

_RETRY_SECONDS = 5

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: parameters"])
Name = Annotated[
    str,
    Path(
        max_length=200,
        description="Its name in the checkpoint, as in the setting `http.parameters`.",
        examples=["lm_head.weight"],
    ),
]


@router.get(
    "/v1/midstream/parameters/{name}",
    summary="Fetch a parameter of the model as a safetensors file",
    description="The whole parameter in the model's dtype, gathered over its ranks. Only names in "
    "the setting `http.parameters` are allowed. One client at a time is served.",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        **error_responses(400, 401, 403, 503),
    },
)
async def parameter(name: Name, server: ServerDep) -> Response:
    allowed = server.settings.parameters
    if name not in allowed:
        raise HttpError(
            403,
            f"clients of this server may not read the parameter {name!r}, but "
            f"{', '.join(allowed) or 'none'}; start it with midstream's setting http.parameters",
            "name",
        )
    # An embedding may take gigabytes: only one is in memory at a time.
    lock, seconds = server.parameter_lock, server.settings.wait_seconds
    try:
        await within(seconds, lock.acquire(), lambda _: lock.release())
    except asyncio.TimeoutError:
        raise HttpError(
            503,
            f"others have read parameters for {seconds} seconds (http.wait_seconds); try again "
            "later",
            retry_after=_RETRY_SECONDS,
        ) from None
    try:
        value = await server.llm.parameter(name)
        data = await asyncio.to_thread(save, {name: value})
        return _Parameter(data, server.parameter_lock, server.settings.stall_seconds)
    except BaseException:
        server.parameter_lock.release()
        raise


class _Parameter(Response):
    """Response with a file, which releases a lock when it is sent, or its client reads nothing."""

    def __init__(self, data: bytes, lock: asyncio.Lock, stall_seconds: float) -> None:
        self._seconds = stall_seconds
        # A response that is never sent releases the lock as well, and none releases it twice.
        self._release = weakref.finalize(self, lock.release)
        super().__init__(data, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_within(self._seconds, send, partial(super().__call__, scope, receive))
        finally:
            self._release()
