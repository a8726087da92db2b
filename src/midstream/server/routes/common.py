"""Shared parts of the routes: dependencies, error handling, and schemas of responses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.types import Message, Receive, Send

from midstream.deadlines import within
from midstream.errors import HttpError, MidstreamError
from midstream.server.routes.request_body import StrictRequest
from midstream.server.server import Server
from midstream.validation import hint, listed

_SHOWN = 200  # maximum length of quoted client data
Check = TypeVar("Check", bound=Callable[[Request], Any])
_before_body: set[Callable[..., Any]] = set()


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
    429: {"model": ErrorBody, "description": "The client's limit is reached."},
    503: {"model": ErrorBody, "description": "The engine is not ready yet."},
    507: {"model": ErrorBody, "description": "The server's limit is reached."},
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of an endpoint's error responses."""
    responses: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in statuses}
    # Without a default FastAPI documents a 422 with its own body, which these routes never return.
    responses["default"] = {"model": ErrorBody, "description": "Internal server error."}
    return responses


def ok_response(example: dict[str, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a successful response with an example, and of errors."""
    content = {"application/json": {"example": example}}
    return {200: {"content": content}, **(error_responses(*errors) if errors else {})}


def before_body(check: Check) -> Check:
    """Mark a dependency of routes that checks a request, and can do so before its body is read."""
    _before_body.add(check)
    return check


class MidstreamRoute(APIRoute):
    """Route that converts exceptions to error responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        calls = [dependency.call for dependency in self.dependant.dependencies]
        checks = [call for call in calls if call in _before_body]
        bodies = [param.field_info.annotation for param in self.dependant.body_params]
        known = [name for body in bodies for name in getattr(body, "model_fields", ())]

        async def guarded(request: Request) -> Response:
            try:
                for check in checks:
                    # FastAPI reads the body before it calls dependencies.
                    if inspect.isawaitable(waiting := check(request)):
                        await waiting
                return await handle(StrictRequest(request.scope, request.receive))
            except (HttpError, MidstreamError) as error:
                refusal = HttpError.of(error)
            except RequestValidationError as error:
                first = error.errors()[0]
                # The first part says whether the value is in the path or in the body.
                where = ".".join(str(part) for part in first["loc"][1:])[:_SHOWN]
                said = first["msg"][:_SHOWN]
                if first["type"] == "extra_forbidden" and len(first["loc"]) == 2:
                    said = f"unknown field{hint(where, known)}; known: {listed(known)}"
                problem = f"{where or 'body'}: {said}"
                refusal = HttpError(400, problem, where or None)
            except HTTPException as error:
                detail: Any = error.detail
                is_refusal = isinstance(detail, HttpError)
                refusal = detail if is_refusal else HttpError(error.status_code, str(detail))
            return Response(
                refusal.content, refusal.status, refusal.headers, media_type="application/json"
            )

        return guarded


async def send_within(
    seconds: float, send: Send, respond: Callable[[Send], Awaitable[None]]
) -> None:
    """Send a response; a client that reads nothing of it for so long gets no more of it."""

    async def timed(message: Message) -> None:
        await within(seconds, send(message))

    with suppress(asyncio.TimeoutError):  # uvicorn closes the connection
        await respond(timed)


def adapter_of(request: Request, name: str | None) -> Any:
    """Return the adapter of a name that vLLM serves, None for the model's; HttpError, 404."""
    models = getattr(request.app.state, "openai_serving_models", None)
    if name is None or models is None or models.is_base_model(name):
        return None
    adapter = models.lora_requests.get(name)
    if adapter is None:
        raise HttpError(404, f"there is no model {name[:100]!r}", "model")
    return adapter


async def client_gone(receive: Receive) -> None:
    """Wait until the client of a request, whose body was read, disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def server_of(request: Request) -> Server:
    server: Server = request.app.state.midstream
    return server


@before_body
def admin(request: Request) -> Server:
    """Return the server, after checking that the request may change it; HttpError, 401 or 403."""
    request.app.state.midstream_guard.check(request.headers)
    return server_of(request)


# Dependencies: the server, for every client and for clients that may change it.
ServerDep = Annotated[Server, Depends(server_of)]
AdminDep = Annotated[Server, Depends(admin)]
