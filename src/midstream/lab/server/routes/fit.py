"""Endpoint for fits: directions between two classes of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from midstream.deadlines import end_tasks
from midstream.errors import HttpError
from midstream.lab.server.fit_body import read_fit
from midstream.lab.server.served_fit import run_fit
from midstream.server.routes.common import (
    ErrorBody,
    MidstreamRoute,
    ServerDep,
    adapter_of,
    admin,
    client_gone,
    error_responses,
    ok_response,
)
from midstream.server.routes.request_body import json_of
from midstream.server.routes.vectors import ABOUT, register_name

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: fits"])

FIT = "/v1/midstream/fit"
_BODY = {
    "positive": ["I feel wonderful today.", "What a lovely surprise!"],
    "negative": ["I feel terrible today.", "What an awful mess!"],
    "name": "cheerful",
}
_SCHEMA = {
    "title": "FitBody",
    "description": "Prompts of two classes; as many of each are pairs.",
    "type": "object",
    "required": ["positive", "negative"],
    "properties": {
        "positive": {"type": "array", "description": "Texts, lists of token ids, or chats."},
        "negative": {"type": "array", "description": "The same, of the other class."},
        "method": {
            "type": "string",
            "default": "mean",
            "description": '"mean", "pca", "lat", "logistic" or "lda".',
        },
        "layers": {},
        "positions": {"description": 'Which tokens. Default: "last_prompt".'},
        "site": {"type": "string", "default": "resid_post"},
        "reduce": {"type": "string", "default": "", "description": '"mean": over the tokens.'},
        "folds": {"type": "integer", "default": 5},
        "groups": {
            "description": "Keys of pairs that are held out together, or a list of keys of each "
            "class."
        },
        "seed": {"type": "integer", "default": 0},
        "name": {
            "type": "string",
            "description": "Name to register the vectors under. Needs what changes of vectors do.",
        },
        "model": {"type": "string", "description": "The model, or an adapter."},
    },
    "additionalProperties": False,
}
_ANSWER = {
    "directions": {
        "format": "midstream.directions/1",
        "site": "resid_post",
        "method": "mean",
        "num_folds": 2,
        "model_type": "llama",
        "best_layer": 15,
        "layers": [
            {
                "layer": 15,
                "vector": {"f32": "AACAPw=="},
                "midpoint": {"f32": "AACAPw=="},
                "gap": 1.0,
                "score": {"auc": 1.0, "accuracy": 1.0, "d_prime": 3.5},
            }
        ],
    },
    "registered": ABOUT,
}


@router.post(
    FIT,
    summary="Fit a direction between two classes of prompts at each layer",
    description="Captures every prompt, fits, and scores each layer on held-out groups (AUC, "
    "accuracy, d′). With `name` the vectors of all fitted layers are registered. Ordinary requests "
    "go first. It ends if its client disconnects.",
    responses={
        **ok_response(_ANSWER),
        **error_responses(400, 401, 403, 404, 413, 415, 503, 507),
        500: {"model": ErrorBody, "description": "The receipt of a run has problems."},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _SCHEMA, "example": _BODY}},
        }
    },
)
async def fit(request: Request, server: ServerDep) -> Any:
    body = read_fit(await json_of(request), server.settings.fit_prompts)
    if body.name is not None:
        admin(request)
    adapter = adapter_of(request, body.model)
    with server.sweeps.begun():
        client = server.client_of(request.scope)
        work = asyncio.ensure_future(run_fit(server, body, adapter, client))
        gone = asyncio.ensure_future(client_gone(request.receive))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks((gone, work))
        if not work.done() or work.cancelled():
            return Response(status_code=499)  # nobody reads it
        directions = work.result()
    size = 8 * directions.vectors.nbytes // 3  # vectors and midpoints in base64
    if size > server.settings.inline_bytes:
        raise HttpError(
            413,
            f"{size} bytes of vectors exceed the limit of {server.settings.inline_bytes} bytes per "
            "response (http.inline_bytes); fit fewer layers",
            "layers",
        )
    registered = None
    if body.name is not None:
        vectors = {
            f"{direction.site}.{direction.layer}": direction.vector for direction in directions
        }
        registered = await asyncio.to_thread(register_name, server, body.name, vectors)
    return {"directions": directions.to_json(), "registered": registered}
