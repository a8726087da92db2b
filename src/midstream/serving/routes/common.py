"""What routes share: the server that they are of, and how they refuse."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from midstream.errors import MidstreamError
from midstream.serving.refusals import Refusal
from midstream.serving.server import Server


class ErrorDetail(BaseModel):
    """What is wrong with a request."""

    message: str = Field(examples=["midstream.capture.layers[0]: there is no layer 99"])
    type: str = Field(examples=["Bad Request"])
    param: str | None = Field(default=None, examples=["midstream.capture.layers[0]"])
    code: int = Field(examples=[400])


class ErrorBody(BaseModel):
    """As vLLM's own errors."""

    error: ErrorDetail


REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Something is malformed or does not fit the model."},
    401: {"model": ErrorBody, "description": "The key is missing or wrong."},
    403: {"model": ErrorBody, "description": "This server lets nobody do it."},
    404: {"model": ErrorBody, "description": "There is no such thing."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    503: {"model": ErrorBody, "description": "The engine is not there yet."},
}


def refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that refuses so."""
    return {status: REFUSED[status] for status in statuses}


class Route(APIRoute):
    """A route whose refusals are answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except (Refusal, MidstreamError) as error:
                found = Refusal.of(error)
                return JSONResponse(found.body, found.status)

        return guarded


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    server: Server = request.app.state.midstream
    return server


def admin(request: Request) -> Server:
    """The same, for who may change it.

    Raises:
        Refusal: the request may not.
    """
    request.app.state.midstream_guard.check(request.headers)
    return server_of(request)
