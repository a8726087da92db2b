"""Endpoint for changes of running requests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.types import Scope

from midstream.errors import HttpError
from midstream.plan import Plan
from midstream.plan.operations import Edit, has_captured
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.server import audit_log
from midstream.server.routes.common import (
    ErrorBody,
    MidstreamRoute,
    ServerDep,
    before_body,
    error_responses,
    ok_response,
    server_of,
)
from midstream.server.running_requests import RunningCall
from midstream.server.server import Server, rows_for

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: running requests"])
Id = Annotated[
    str,
    Path(
        max_length=256,
        description="The id in the request's response or its events, such as `chatcmpl-…`.",
        examples=["chatcmpl-8f4c"],
    ),
]

_ANSWER = {"id": "chatcmpl-8f4c", "choices": [{"index": 0, "version": 1, "position": 37}]}


@before_body
async def running_calls(request: Request) -> list[RunningCall]:
    """Return the calls of the request that a path names; HttpError: 404 none, 409 several, 503."""
    server = server_of(request)
    _ = server.llm  # raises 503 until the engine is ready
    request_id = request.path_params["id"]
    calls = server.running.find(request_id, server.client_of(request.scope))
    if not calls:
        raise _not_running(request_id)
    return calls


CallsDep = Annotated[list[RunningCall], Depends(running_calls)]


class UpdateBody(BaseModel):
    """Other edits of a running request; at least one of the fields."""

    model_config = ConfigDict(extra="forbid")

    edits: Any = Field(
        default=None,
        description="The request's own edits from now on, in the form of `midstream.edits`; `[]`: "
        "none. Left out: those given last.",
        examples=[[{"op": "scale", "factor": 1.5, "layer": 3}]],
    )
    scale: float | None = Field(
        default=None,
        description="Factor on the strength of the edits given last: 0 turns them off, 1 restores "
        "them.",
        examples=[0.5],
    )


@router.post(
    "/v1/midstream/requests/{id:path}/update",
    summary="Change the edits of a running request of the same client",
    description="They hold from the first position that is not scheduled yet: `position` of each "
    "choice that still runs. The receipt lists the versions and where each held.",
    responses={
        **ok_response(_ANSWER),
        **error_responses(400, 401, 403, 404, 413, 503),
        409: {"model": ErrorBody, "description": "Several running requests have this id."},
    },
)
async def update(
    id: Id, body: UpdateBody, request: Request, calls: CallsDep, server: ServerDep
) -> dict[str, Any]:
    edits = body.edits
    if edits is not None and edits != []:
        # Parsing megabytes of numbers would block the event loop.
        edits = await in_thread(_read, edits, request.scope, server)
    plans = [call.call_plan for call in calls]
    changes = await server.llm.update_all(plans, edits=edits, scale=body.scale)
    choices = [
        {"index": call.first + index, "version": change.version, "position": position}
        for call, change in zip(calls, changes, strict=True)
        if change is not None  # this prompt's has ended
        for index, position in sorted(change.positions.items())
    ]
    if not choices:
        raise _not_running(id)
    audit_log.log_event("request.updated", request_id=id, choices=len(choices))
    return {"id": id, "choices": choices}


def _read(edits: Any, scope: Scope, server: Server) -> tuple[Edit, ...]:
    plan = Plan.make(edits=edits)
    assert plan is not None
    if any(map(has_captured, plan.edits)):
        with rows_for(server, scope) as open_rows:
            plan = plan.fill(open_rows, server.llm.info.shape)
    return plan.edits


def _not_running(request_id: str) -> HttpError:
    return HttpError(
        404,
        f"no request {request_id[:64]!r} of this client with a plan runs: it has ended, or there "
        "was none",
        "id",
    )
