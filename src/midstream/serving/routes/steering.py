"""Server-wide steering: what every request gets before its own edits."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from midstream.serving.routes.common import Changed, Here, Route, refused
from midstream.steering import TIERS

router = APIRouter(route_class=Route, tags=["midstream: steering"])

_TIER = (
    "An edit, the name of registered vectors, `[name, scale]`, `{site: {layer: vector}}`, or a "
    "list of these. `[]` empties the tier; left out, it stays as it is."
)


class Tiers(BaseModel):
    """The tiers to set; those that are left out stay as they are."""

    model_config = ConfigDict(extra="forbid")

    base: Any = Field(
        default=None,
        description=f"For every token. {_TIER}",
        examples=[{"op": "steer", "vector": {"name": "cheerful"}, "layer": 12, "scale": 2.0}],
    )
    prompt: Any = Field(default=None, description=f"For the tokens of prompts. {_TIER}")
    generated: Any = Field(default=None, description=f"For generated tokens. {_TIER}")


class State(BaseModel):
    """What is in force for requests that are taken in from now on."""

    epoch: int = Field(description="How often it was changed.", examples=[3])
    digest: str = Field(description="sha256 of all that it says.")
    base: list[dict[str, Any]]
    prompt: list[dict[str, Any]]
    generated: list[dict[str, Any]]


@router.get("/v1/midstream/steering", summary="What is in force", responses=refused(401, 503))
def show(server: Here) -> State:
    return State(**server.llm.steering.show().to_dict())


@router.put(
    "/v1/midstream/steering",
    summary="Set tiers, all at once",
    description="A request has what was in force when it was taken in, on every rank and in every "
    "step; `epoch` says which state that is.",
    responses=refused(400, 401, 403, 413, 503),
)
def change(tiers: Tiers, server: Changed) -> State:
    given = {tier: getattr(tiers, tier) for tier in TIERS if tier in tiers.model_fields_set}
    state = server.llm.steering.set(**given)
    server.steered(state)
    return State(**state.to_dict())


@router.delete(
    "/v1/midstream/steering", summary="Empty all tiers", responses=refused(401, 403, 503)
)
def clear(server: Changed) -> State:
    state = server.llm.steering.clear()
    server.steered(state)
    return State(**state.to_dict())
