"""What routes share: the server that they are of, and how they refuse."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from midstream.errors import MidstreamError, SpecError
from midstream.serving.refusals import Refusal
from midstream.serving.server import Server
from midstream.spec.fields import read_json

_SHOWN = 200  # characters of what a client wrote


class ErrorDetail(BaseModel):
    """What is wrong with a request."""

    message: str = Field(examples=["midstream.capture.layers[0]: there is no layer 99"])
    type: str = Field(examples=["Bad Request"])
    param: str | None = Field(default=None, examples=["midstream.capture.layers[0]"])
    code: int = Field(examples=[400])


class ErrorBody(BaseModel):
    """As vLLM's own errors."""

    error: ErrorDetail


class Unauthorized(BaseModel):
    """The server's own key is asked for by vLLM, which says less."""

    error: ErrorDetail | str = Field(examples=["Unauthorized"])


REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Something is malformed or does not fit the model."},
    401: {"model": Unauthorized, "description": "The key is missing or wrong."},
    403: {"model": ErrorBody, "description": "This server lets nobody do it."},
    404: {"model": ErrorBody, "description": "There is no such thing."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    415: {"model": ErrorBody, "description": "The body is of another kind."},
    503: {"model": ErrorBody, "description": "The engine is not there yet."},
    507: {"model": ErrorBody, "description": "There is no room for it."},
}


def refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that refuses so."""
    found: dict[int | str, dict[str, Any]] = {status: REFUSED[status] for status in statuses}
    # Without it FastAPI would promise a 422 of a form of its own, which is not answered here.
    found["default"] = {"model": ErrorBody, "description": "Something went wrong in the server."}
    return found


def answered(example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint that serves, by an example."""
    return {200: {"content": {"application/json": {"example": example}}}}


class _Strict(Request):
    """A request whose JSON is read as all of midstream's: no field twice, no NaN."""

    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except SpecError as error:
            raise HTTPException(400, str(error)) from None


class Route(APIRoute):
    """A route whose refusals are answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(_Strict(request.scope, request.receive))
            except (Refusal, MidstreamError) as error:
                found = Refusal.of(error)
            except RequestValidationError as error:
                found = _invalid(error)
            except HTTPException as error:
                found = Refusal(error.status_code, str(error.detail))
            return Response(found.content, found.status, media_type="application/json")

        return guarded


def _invalid(error: RequestValidationError) -> Refusal:
    first = error.errors()[0]
    # The first says whether it is of the path or of the body.
    where = ".".join(str(part) for part in first["loc"][1:])[:_SHOWN]
    return Refusal(400, f"{where or 'body'}: {first['msg'][:_SHOWN]}", where or None)


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


# The server, of who may ask it and of who may change it.
Here = Annotated[Server, Depends(server_of)]
Changed = Annotated[Server, Depends(admin)]
