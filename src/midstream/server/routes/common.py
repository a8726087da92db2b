"""Shared parts of the routes: dependencies, error handling, and schemas of responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.types import Message, Receive, Send

from midstream.errors import HttpError, MidstreamError, SpecError
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.server.body_values import check_values, is_long
from midstream.server.server import Server
from midstream.validation import read_json

_SHOWN = 200  # maximum length of quoted client data


class ErrorDetail(BaseModel):
    """The error of a rejected request."""

    message: str = Field(examples=["midstream.capture.layers[0]: there is no layer 99"])
    type: str = Field(examples=["Bad Request"])
    param: str | None = Field(default=None, examples=["midstream.capture.layers[0]"])
    code: int = Field(examples=[400])


class ErrorBody(BaseModel):
    """Body of an error response, as vLLM's own."""

    error: ErrorDetail


class Unauthorized(BaseModel):
    """Body of a 401 response; vLLM's check of its API key returns a plain string."""

    error: ErrorDetail | str = Field(examples=["Unauthorized"])


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is malformed or does not fit the model."},
    401: {"model": Unauthorized, "description": "The key is missing or wrong."},
    403: {"model": ErrorBody, "description": "This server does not allow it."},
    404: {"model": ErrorBody, "description": "The name or id is unknown."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    415: {"model": ErrorBody, "description": "The content type is unsupported."},
    503: {"model": ErrorBody, "description": "The engine is not ready yet."},
    507: {"model": ErrorBody, "description": "The server's limit is reached."},
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of an endpoint's error responses."""
    found: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in statuses}
    # Without a default FastAPI documents a 422 with its own body, which these routes never return.
    found["default"] = {"model": ErrorBody, "description": "Internal server error."}
    return found


def ok_response(example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry of a successful response with an example."""
    return {200: {"content": {"application/json": {"example": example}}}}


class _StrictRequest(Request):
    """Request whose JSON is parsed strictly, and whose body is limited: duplicate keys, NaN and too
    many bytes are errors.
    """

    async def stream(self) -> AsyncGenerator[bytes, None]:
        limit, size = server_of(self).settings.max_body_bytes, 0
        async for part in super().stream():
            size += len(part)
            if size > limit:
                raise HTTPException(413, f"the body exceeds this server's limit of {limit} bytes")
            yield part

    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except SpecError as error:
            raise HTTPException(400, str(error)) from None


class MidstreamRoute(APIRoute):
    """Route that converts exceptions to error responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        is_change = any(each.call is admin for each in self.dependant.dependencies)

        async def guarded(request: Request) -> Response:
            try:
                if is_change:
                    # FastAPI reads the body before it calls dependencies.
                    admin(request)
                return await handle(_StrictRequest(request.scope, request.receive))
            except (HttpError, MidstreamError) as error:
                found = HttpError.of(error)
            except RequestValidationError as error:
                found = _invalid(error)
            except HTTPException as error:
                found = HttpError(error.status_code, str(error.detail))
            return Response(
                found.content, found.status, found.headers, media_type="application/json"
            )

        return guarded


def _invalid(error: RequestValidationError) -> HttpError:
    first = error.errors()[0]
    # The first part says whether the value is in the path or in the body.
    where = ".".join(str(part) for part in first["loc"][1:])[:_SHOWN]
    return HttpError(400, f"{where or 'body'}: {first['msg'][:_SHOWN]}", where or None)


async def send_within(
    seconds: float, send: Send, respond: Callable[[Send], Awaitable[None]]
) -> None:
    """Send a response; a client that reads nothing of it for so long gets no more of it.

    Args:
        seconds: longest time for one message.
        send: the server's function that sends a message.
        respond: sends the response by the function that it is given.
    """

    async def timed(message: Message) -> None:
        await asyncio.wait_for(send(message), seconds)

    with suppress(asyncio.TimeoutError):  # uvicorn closes the connection
        await respond(timed)


async def json_of(request: Request) -> Any:
    """Return the JSON of a body, which a thread parses if it is long.

    Raises:
        HttpError: 415, the body is of another content type; 413, it has too many values.
        SpecError: it is malformed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, "expected content type application/json")
    data = await request.body()
    check_values(data)
    if is_long(data):
        return await in_thread(read_json, data)
    return read_json(data)


def adapter_of(request: Request, name: str | None) -> Any:
    """Return the adapter of a name that vLLM serves; None: it is the model's.

    Raises:
        HttpError: 404, there is neither.
    """
    models = getattr(request.app.state, "openai_serving_models", None)
    if name is None or models is None or models.is_base_model(name):
        return None
    found = models.lora_requests.get(name)
    if found is None:
        raise HttpError(404, f"there is no model {name[:100]!r}", "model")
    return found


async def client_gone(receive: Receive) -> None:
    """Wait until the client of a request, whose body was read, disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def server_of(request: Request) -> Server:
    """Return the state of the server that received a request."""
    server: Server = request.app.state.midstream
    return server


def admin(request: Request) -> Server:
    """Return the server, after checking that the request may change it.

    Raises:
        HttpError: 401 or 403, the request may not.
    """
    request.app.state.midstream_guard.check(request.headers)
    return server_of(request)


# Dependencies: the server, for every client and for clients that may change it.
ServerDep = Annotated[Server, Depends(server_of)]
AdminDep = Annotated[Server, Depends(admin)]
