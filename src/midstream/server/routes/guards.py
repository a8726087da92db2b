"""Endpoints for guards: named, versioned probes of requests, which act. Clients who may not change
them cannot read them: a threshold tells how to stay below it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from midstream.errors import HttpError, NoRoomError, SpecError
from midstream.server import audit_log
from midstream.server.routes.common import (
    AdminDep,
    MidstreamRoute,
    error_responses,
    ok_response,
)
from midstream.server.server import Server
from midstream.steering.guard_definition import NAME
from midstream.steering.guards import GuardVersion

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: guards"])
Name = Annotated[str, Path(pattern=f"^{NAME.pattern}$", examples=["toxic"])]
Full = Annotated[bool, Query(description="Whether to return vectors too.", examples=[False])]

_PROBE = {"direction": {"name": "toxic"}, "layer": 15, "phase": "generated"}
_ABOUT = {
    "name": "toxic",
    "version": 3,
    "change": "promote",
    "time": "2026-01-31T12:00:00.000+00:00",
    "who": "9f86d081884c7d65",
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a0",
    "action": "flag",
    "probe": {"layer": 15, "phase": "generated"},
    "above": 2.0,
}


class GuardBody(BaseModel):
    """What a guard reads, of which requests, and what it does."""

    model_config = ConfigDict(extra="forbid")

    probe: Any = Field(
        default=None,
        description="A probe (`Probe.to_dict()`), or the name of registered vectors; only a guard "
        "with `when` may have none.",
        examples=[_PROBE],
    )
    above: Any = Field(default=None, description="Threshold of the pooled score.", examples=[2.0])
    below: Any = Field(default=None, description="Threshold in place of `above`.")
    for_: Any = Field(default=None, alias="for", description="How many tokens in a row.")
    pool: Any = Field(default=None, description='"none", "max", "mean:8" or "ema:0.9".')
    output: Any = Field(
        default=None, description="Of a probe with classes, the one whose scores count."
    )
    action: Any = Field(
        default="shadow", description='"shadow", "flag", "stop", "switch" or "webhook".'
    )
    edits: Any = Field(default=None, description='The edits of "switch".')
    webhook: Any = Field(default=None, description='A URL, or `{"url": …, "seconds": 5}`.')
    scope: Any = Field(
        default=None,
        description='The requests that it is for: `{"models": […], "keys": […], "share": 0.1}`; '
        "keys are fingerprints, the first 16 hex digits of the SHA-256 of an API key.",
    )
    when: Any = Field(
        default=None, description='Its first stage: `{"guard": "cheap", "above": 1.0}`.'
    )
    if_unavailable: Any = Field(
        default=None,
        description='What a second stage does that could not read the answer: "act" or "pass".',
    )
    message: Any = Field(default=None, description="Is added to an answer that it stops.")
    visible: Any = Field(default=None, description="Whether clients that ask see that it acted.")
    text: Any = Field(default=None, description="Whether its events have generated text.")
    training: Any = Field(
        default=None,
        description="How many completions of its probe's training had which score, for the metric "
        'of drift: `{"edges": […], "counts": […], "seconds": 3600}`, one more count than edges.',
    )


class RollbackBody(BaseModel):
    """To which version."""

    model_config = ConfigDict(extra="forbid")

    version: StrictInt | None = Field(
        default=None, description="None: the one before.", examples=[2]
    )


@router.get(
    "/v1/midstream/guards",
    summary="List guards, without vectors",
    responses=ok_response({"guards": [_ABOUT]}, 400, 401, 403, 503),
)
def listing(server: AdminDep, full: Full = False) -> dict[str, Any]:
    guards = server.llm.guards
    shown = []
    for guard in guards.active():
        version = guards.history(guard.name)[-1]
        if version.definition is not None:
            shown.append(_shown(guard.name, version, full))
    return {"guards": shown}


@router.get(
    "/v1/midstream/guards/{name}",
    summary="Show one guard",
    responses=ok_response(_ABOUT, 400, 401, 403, 404, 503),
)
def show(name: Name, server: AdminDep, full: Full = False) -> dict[str, Any]:
    try:
        return _shown(name, server.llm.guards.show(name), full)
    except SpecError as error:
        raise HttpError(404, error.problem, "name") from None


@router.put(
    "/v1/midstream/guards/{name}",
    summary="Define a guard, as a new version",
    description="It holds in all API server processes before the answer. Requests that were "
    "accepted before keep the version that they began with.",
    responses=ok_response(_ABOUT, 400, 401, 403, 413, 503, 507),
)
async def put(name: Name, body: GuardBody, request: Request, server: AdminDep) -> dict[str, Any]:
    form = body.model_dump(by_alias=True)
    check_scope(server, form.get("scope"), request)
    guards, who = server.llm.guards, server.client_of(request.scope)
    return await _changed(name, partial(guards.put, name, form, who, server.settings.vector_bytes))


@router.delete(
    "/v1/midstream/guards/{name}",
    status_code=204,
    summary="Delete a guard; its history stays",
    responses=error_responses(400, 401, 403, 404, 503),
)
async def remove(name: Name, request: Request, server: AdminDep) -> Response:
    who = server.client_of(request.scope)
    await _changed(name, partial(server.llm.guards.remove, name, who))
    return Response(status_code=204)


@router.post(
    "/v1/midstream/guards/{name}/promote",
    summary="Take the next action of shadow, flag, stop",
    responses=ok_response(_ABOUT, 400, 401, 403, 404, 503),
)
async def promote(name: Name, request: Request, server: AdminDep) -> dict[str, Any]:
    who = server.client_of(request.scope)
    return await _changed(name, partial(server.llm.guards.promote, name, who))


@router.post(
    "/v1/midstream/guards/{name}/rollback",
    summary="Make a new version that equals an old one",
    responses=ok_response(_ABOUT, 400, 401, 403, 404, 413, 503, 507),
)
async def rollback(
    name: Name, body: RollbackBody, request: Request, server: AdminDep
) -> dict[str, Any]:
    guards, who, room = server.llm.guards, server.client_of(request.scope), server.settings
    change = partial(guards.rollback, name, body.version, who, room.vector_bytes)
    return await _changed(name, change)


@router.get(
    "/v1/midstream/guards/{name}/history",
    summary="List the last versions of a guard, also of a deleted one",
    responses=ok_response({"name": "toxic", "versions": [_ABOUT]}, 400, 401, 403, 404, 503),
)
def history(name: Name, server: AdminDep, full: Full = False) -> dict[str, Any]:
    try:
        versions = server.llm.guards.history(name)
    except SpecError as error:
        raise HttpError(404, error.problem, "name") from None
    return {"name": name, "versions": [version.to_dict(full) for version in versions]}


async def _changed(name: str, change: Callable[[], GuardVersion]) -> dict[str, Any]:
    """Make a change and log it; HttpError, 404: there is no such guard; 507: no room."""
    try:
        # It waits for the other processes, and reads megabytes of numbers.
        version = await run_in_threadpool(change)
    except NoRoomError as error:
        raise HttpError(507, str(error), error.path) from None
    except SpecError as error:
        if error.path == "name":
            raise HttpError(404, error.problem, "name") from None
        raise
    audit_log.log_event(
        "guard.changed",
        name=name,
        version=version.number,
        change=version.change,
        action=None if version.definition is None else version.definition.action,
        who=version.who,
        time=version.time,
    )
    return _shown(name, version, False)


def check_scope(server: Server, scope: Any, request: Request) -> None:
    """Check that there are the keys, models and adapters of a scope: else it guards nothing."""
    if isinstance(scope, dict) and scope.get("keys") and not server.has_key:
        raise SpecError("scope.keys", "this server has no API keys; start it with --api-key")
    models = scope.get("models") if isinstance(scope, dict) else None
    names = [models] if isinstance(models, str) else models
    if not isinstance(names, list):
        return
    served = getattr(request.app.state, "openai_serving_models", None)
    known = {*server.guards.models, *getattr(served, "lora_requests", ())}
    for index, name in enumerate(names):
        if isinstance(name, str) and name not in known:
            raise SpecError(
                f"scope.models[{index}]", f"this server has no model {name[:100]!r} now"
            )


def _shown(name: str, version: GuardVersion, full: bool) -> dict[str, Any]:
    return {"name": name, **version.to_dict(full)}
