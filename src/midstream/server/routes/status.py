"""Endpoints for the sites of the model, and for the server's status."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from midstream.server.routes.common import MidstreamRoute, ServerDep, error_responses, ok_response

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: status"])

_SITE = {"site": "z", "layer": 0, "tapped": True, "reason": "", "width": 576, "heads": 9}
_STATUS = {
    "midstream": "0.1.0",
    "vllm": "0.32.0",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "dtype": "bfloat16",
    "codec": "raw",
    "taps": 30,
    "uptime_seconds": 12.5,
    "admin": True,
    "steering": {
        "epoch": 0,
        "digest": "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945",
        "base": 0,
        "prompt": 0,
        "generated": 0,
    },
    "vectors": 0,
    "vector_names": [],
    "shared_changes": None,
    "lens_names": [],
    "sae_names": [],
    "held": {"captures": 0, "bytes": 0},
    "events": {"jsonl": {"delivered": 12, "dropped": 0, "dead_letters": 0, "waiting": 0}},
    "requests": 0,
    "waiting": 0,
    "weight_version": {"number": 3, "name": "step 300"},
    "workers_age_seconds": 0.0,
}


@router.get(
    "/v1/midstream/sites",
    summary="List every site of every layer: tapped, or the reason why not",
    responses=ok_response({"num_layers": 30, "hidden_size": 576, "sites": [_SITE]}, 401, 503),
)
def sites(server: ServerDep) -> dict[str, Any]:
    table = server.llm.sites()
    shape = server.llm.info.shape
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "sites": [asdict(state) for state in table.states],
    }


@router.get(
    "/midstream/ready",
    summary="Say whether requests are accepted",
    description="200 once the engine runs, its taps were checked, and the vectors and edits of the "
    "settings are registered; 503 before, after a failure, and while the server shuts down. Needs "
    "no key.",
    responses={
        **ok_response({"ready": True}),
        503: {"content": {"application/json": {"example": {"ready": False}}},
              "description": "Not ready."},
        **{"default": error_responses()["default"]},
    },
)  # fmt: skip
def ready(server: ServerDep, response: Response) -> dict[str, bool]:
    response.status_code = 200 if server.is_ready else 503
    return {"ready": server.is_ready}


@router.get(
    "/v1/midstream/status",
    summary="Show versions, settings and usage",
    responses=ok_response(_STATUS, 401, 503),
)
async def status(server: ServerDep) -> dict[str, Any]:
    return await server.state()
