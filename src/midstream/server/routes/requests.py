"""Endpoint for changes of running requests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from midstream.errors import HttpError, SpecError
from midstream.server import audit_log
from midstream.server.routes.common import (
    MidstreamRoute,
    ServerDep,
    error_responses,
    ok_response,
)
from midstream.spec import Plan

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
    responses={**ok_response(_ANSWER), **error_responses(400, 401, 403, 404, 413, 503)},
)
async def update(id: Id, given: UpdateBody, request: Request, server: ServerDep) -> dict[str, Any]:
    llm = server.llm
    calls = server.running.find(id, server.client_of(request.scope))
    if not calls:
        raise _not_running(id)
    edits = given.edits
    if edits is not None and edits != []:
        # Parsing megabytes of numbers would block the event loop.
        plan = await run_in_threadpool(Plan.make, edits=edits)
        assert plan is not None
        edits = plan.edits
    choices = []
    for call in calls:
        try:
            found = await llm.update(call.call_plan, edits=edits, scale=given.scale)
        except SpecError as error:
            if error.path == "request_id":
                continue  # this prompt's has ended meanwhile
            raise
        choices += [
            {"index": call.first + index, "version": found.version, "position": position}
            for index, position in sorted(found.positions.items())
        ]
    if not choices:
        raise _not_running(id)
    audit_log.log_event("request.updated", request_id=id, choices=len(choices))
    return {"id": id, "choices": choices}


def _not_running(request_id: str) -> HttpError:
    return HttpError(
        404,
        f"no request {request_id[:64]!r} of this client with a plan runs: it has ended, or there "
        "was none",
        "id",
    )
