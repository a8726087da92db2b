"""Endpoints for server-wide captures, which every request has in addition to its own."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from midstream.errors import HttpError, SpecError
from midstream.results.serialization import pack
from midstream.server import audit_log
from midstream.server.peers import add_kept
from midstream.server.results_json import describe
from midstream.server.routes.common import (
    AdminDep,
    MidstreamRoute,
    ServerDep,
    error_responses,
    ok_response,
)
from midstream.server.server import Server
from midstream.sinks.base import Delivery

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: captures of every request"])
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$", examples=["watch"])]

_CAPTURE = {"layers": [12], "sites": ["resid_post"], "positions": ["last_prompt"]}
_ABOUT = {
    "name": "watch",
    "capture": [{**_CAPTURE, "sink": "kept", "tag": "watch"}],
    "kept": {"completions": 2, "bytes": 4608, "dropped": 0},
}
_ROWS = {
    "request_id": "cmpl-8f4c",
    "completion": 0,
    "prompt_tokens": 5,
    "generated_tokens": 3,
    "finish_reason": "length",
    "status": "ok",
    "activations": {
        "format": "safetensors",
        "codec": "raw",
        "rows": {"resid_post.12": 1},
        "base64": "…",
    },
}


class ServerCaptureBody(BaseModel):
    """What to capture for every request, and where the rows go."""

    model_config = ConfigDict(extra="forbid")

    capture: Any = Field(
        description="A capture or a list of captures, without `stream` and `request_id`.",
        examples=[_CAPTURE],
    )
    sink: str | None = Field(
        default=None,
        description="A sink that the server was started with, or `memory`. Left out: the sink of "
        "the captures; if they have none, rows are kept until they are collected.",
    )


@router.get(
    "/v1/midstream/captures/{name}",
    summary="Show one server-wide capture",
    responses=ok_response(_ABOUT, 400, 401, 404, 503),
)
async def show(name: Name, request: Request, server: ServerDep) -> dict[str, Any]:
    others = await _others(name, request, server)
    description = _known(server, name)
    for other in others:
        add_kept([description], [other])
    return description


@router.put(
    "/v1/midstream/captures/{name}",
    summary="Capture for every request from now on",
    description="Replaces what the name stood for. Running requests are unchanged.",
    responses=ok_response(_ABOUT, 400, 401, 403, 413, 503),
)
def change(name: Name, body: ServerCaptureBody, server: AdminDep) -> dict[str, Any]:
    server_capture = server.llm.captures.set(name, body.capture, body.sink)
    sinks = sorted({capture.sink for capture in server_capture.captures})
    audit_log.log_event(
        "captures.set", name=name, captures=len(server_capture.captures), sinks=sinks
    )
    return dict(server_capture.to_dict())


@router.delete(
    "/v1/midstream/captures/{name}",
    status_code=204,
    summary="Capture no longer for new requests, and discard kept rows",
    responses=error_responses(400, 401, 403, 404, 503),
)
def remove(name: Name, server: AdminDep) -> Response:
    _known(server, name)
    server.llm.captures.clear(name)
    audit_log.log_event("captures.cleared", name=name)
    return Response(status_code=204)


@router.delete(
    "/v1/midstream/captures",
    status_code=204,
    summary="Clear all server-wide captures",
    responses=error_responses(401, 403, 503),
)
def clear(server: AdminDep) -> Response:
    server.llm.captures.clear()
    audit_log.log_event("captures.cleared")
    return Response(status_code=204)


@router.post(
    "/v1/midstream/captures/{name}/collect",
    summary="Return kept rows of ended requests, oldest first, and keep them no longer",
    description="One answer has at most `http.inline_bytes` of rows, or one completion; collect "
    "again while `kept` is above 0. `dropped` completions did not fit into the memory.",
    responses=ok_response(
        {"completions": [_ROWS], "dropped": 0, "kept": 0}, 400, 401, 403, 404, 503
    ),
)
async def collect(name: Name, request: Request, server: AdminDep) -> dict[str, Any]:
    _known(server, name)
    # Asked first: one that does not answer must not lose what is collected.
    kept = sum(
        description["kept"]["completions"] for description in await _others(name, request, server)
    )
    captures, info = server.llm.captures, server.llm.info
    collected = captures.collect(name, server.settings.inline_bytes)
    vectors = info.shape.hidden_size, getattr(torch, info.dtype)
    try:
        completions = [
            await run_in_threadpool(_encoded, completion, *vectors) for completion in collected
        ]
        dropped = collected.dropped
        if not completions and server.peers is not None:
            # One other process after the other, until one has any.
            async for other in server.peers.each(request.scope, "POST"):
                completions, dropped = other["completions"], dropped + other["dropped"]
                if completions:
                    kept = max(0, kept - len(completions))
                    break
    except BaseException:
        captures.put_back(collected)
        raise
    own = _known(server, name).get("kept", {})
    return {
        "completions": completions,
        "dropped": dropped,
        "kept": kept + own.get("completions", 0),
    }


async def _others(name: str, request: Request, server: Server) -> list[dict[str, Any]]:
    """Return the descriptions of a name in the other API server processes that keep rows for it."""
    _known(server, name)
    if server.peers is None:
        return []
    path = f"/v1/midstream/captures/{name}"
    every = [other async for other in server.peers.each(request.scope, path=path)]
    return [other for other in every if "kept" in other]


def _known(server: Server, name: str) -> dict[str, Any]:
    try:
        about: dict[str, Any] = server.llm.captures.show(name).to_dict()
    except SpecError as error:
        raise HttpError(404, error.problem, "name") from None
    return about


def _encoded(delivery: Delivery, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    rows = delivery.activations
    packed = base64.b64encode(pack(rows, hidden, dtype)).decode("ascii")
    return {
        "request_id": delivery.request_id,
        "completion": delivery.completion,
        "prompt_tokens": delivery.prompt_tokens,
        "generated_tokens": len(delivery.generated_token_ids),
        "finish_reason": delivery.finish_reason,
        "status": delivery.receipt.status,
        "activations": {**describe(rows), "base64": packed},
    }
