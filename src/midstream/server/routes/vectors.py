"""Endpoints for named vectors: register, list, show, remove."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.concurrency import run_in_threadpool

from midstream.errors import HttpError, NoRoomError, SpecError
from midstream.plan.vectors.named_lookup import NamedEdits
from midstream.server import audit_log
from midstream.server.routes.common import (
    AdminDep,
    MidstreamRoute,
    ServerDep,
    error_responses,
    ok_response,
)
from midstream.server.routes.uploads import uploaded
from midstream.server.server import Server

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: vectors"])
Name = Annotated[
    str,
    Path(pattern=r"^[A-Za-z0-9_:-][A-Za-z0-9_.:/-]{0,127}$", examples=["cheerful"]),
]

# Example of the description of a name.
ABOUT = {
    "name": "cheerful",
    "taps": [["resid_post", 15]],
    "norms": [3.0],
    "width": 576,
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a0",
    "registered": 1,
}


@router.get(
    "/v1/midstream/vectors",
    summary="List names, without their vectors",
    responses=ok_response({"vectors": [ABOUT]}, 401, 503),
)
def listing(server: ServerDep) -> dict[str, Any]:
    return {"vectors": [registered.to_dict() for registered in server.llm.vectors.list()]}


@router.get(
    "/v1/midstream/vectors/{name:path}",
    summary="Show one name with its vectors or edits",
    responses=ok_response({**ABOUT, "vectors": [{"f32": "AACAPw=="}]}, 400, 401, 404, 503),
)
def show(name: Name, server: ServerDep) -> dict[str, Any]:
    try:
        about, contents = server.llm.vectors.show(name)
    except SpecError as error:
        raise HttpError(404, error.problem, "name") from None
    if isinstance(contents, NamedEdits):
        return {**about.to_dict(), "edits": [edit.to_dict() for edit in contents.edits]}
    return {**about.to_dict(), "vectors": [vector.emit() for vector in contents.values()]}


@router.put(
    "/v1/midstream/vectors/{name:path}",
    summary="Register vectors or whole edits under a name, replacing earlier ones",
    description="JSON: `{layer: vector}`, `{site: {layer: vector}}`, or one vector without a "
    'layer; a vector is a list of numbers, `{"f32": base64}` or '
    '`{"vector": …, "scale": …}`, a matrix `[width, width]` a list of rows or '
    '`{"f32": base64, "shape": [width, width]}`. Or whole edits: `{"base": …, "prompt": …, '
    '"generated": …, "edits": […]}`, tiers as in `/v1/midstream/steering`. '
    "Or a safetensors file (`application/octet-stream`) with tensors named `{site}.{layer}` or "
    "`{layer}`, or a GGUF control vector (tensors `direction.{layer}`). Running requests continue "
    "with the vectors that they started with.",
    responses=ok_response(ABOUT, 400, 401, 403, 413, 415, 503, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"type": ["object", "array"]},
                    "example": {"resid_post": {"15": [0.1, -0.2]}},
                },
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
)
async def register(name: Name, request: Request, server: AdminDep) -> dict[str, Any]:
    # Reading megabytes of numbers would block the event loop.
    return await run_in_threadpool(register_name, server, name, await uploaded(request))


@router.delete(
    "/v1/midstream/vectors/{name:path}",
    status_code=204,
    summary="Remove a name",
    description="Requests that were accepted with it keep their vectors.",
    responses=error_responses(400, 401, 403, 404, 503),
)
def remove(name: Name, server: AdminDep) -> Response:
    remove_name(server, name)
    return Response(status_code=204)


def register_name(server: Server, name: str, vectors: object) -> dict[str, Any]:
    """Register vectors; return the registry's description. HttpError, 507: no room."""
    registry = server.llm.vectors
    try:
        # The size is known only after parsing; the limit of the body bounds that.
        registered = registry.register(name, vectors, server.settings.vector_bytes)
    except NoRoomError as error:
        raise HttpError(507, str(error), error.path) from None
    about: dict[str, Any] = registered.to_dict()
    audit_log.log_event(
        "vectors.registered", name=name, taps=len(about["taps"]), width=about["width"]
    )
    return about


def remove_name(server: Server, name: str) -> None:
    """Remove a name; HttpError, 404: it is unknown."""
    try:
        server.llm.vectors.remove(name)
    except SpecError as error:
        raise HttpError(404, error.problem, "name") from None
    audit_log.log_event("vectors.removed", name=name)
