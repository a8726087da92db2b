"""Endpoints for server-wide steering, which applies to every request before its own edits."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from midstream.server.routes.common import AdminDep, MidstreamRoute, ServerDep, error_responses
from midstream.server.server import record_steering
from midstream.steering.edit_forms import TIERS

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: steering"])

_TIER = (
    "An edit, the name of registered vectors, `[name, scale]`, `{site: {layer: vector}}`, or a "
    "list of these. `[]` empties the tier; a tier that is left out is unchanged."
)


class Tiers(BaseModel):
    """The tiers to set; tiers that are left out are unchanged."""

    model_config = ConfigDict(extra="forbid")

    base: Any = Field(
        default=None,
        description=f"For every token. {_TIER}",
        examples=[{"op": "steer", "vector": {"name": "cheerful"}, "layer": 12, "scale": 2.0}],
    )
    prompt: Any = Field(default=None, description=f"For the tokens of prompts. {_TIER}")
    generated: Any = Field(default=None, description=f"For generated tokens. {_TIER}")


class State(BaseModel):
    """Steering that new requests get."""

    epoch: int = Field(description="Number of changes so far.", examples=[3])
    digest: str = Field(description="sha256 of all tiers.")
    base: list[dict[str, Any]]
    prompt: list[dict[str, Any]]
    generated: list[dict[str, Any]]


@router.get(
    "/v1/midstream/steering", summary="Show active steering", responses=error_responses(401, 503)
)
def show(server: ServerDep) -> State:
    return State(**server.llm.steering.show().to_dict())


@router.put(
    "/v1/midstream/steering",
    summary="Set tiers atomically",
    description="A request uses the steering that was active when it was accepted, on every rank "
    "and in every step; `epoch` identifies that state.",
    responses=error_responses(400, 401, 403, 413, 503),
)
def change(tiers: Tiers, server: AdminDep) -> State:
    edits = {tier: getattr(tiers, tier) for tier in TIERS if tier in tiers.model_fields_set}
    state = server.llm.steering.set(**edits)
    record_steering(state)
    return State(**state.to_dict())


@router.delete(
    "/v1/midstream/steering", summary="Empty all tiers", responses=error_responses(401, 403, 503)
)
def clear(server: AdminDep) -> State:
    state = server.llm.steering.clear()
    record_steering(state)
    return State(**state.to_dict())
