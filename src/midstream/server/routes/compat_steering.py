"""Endpoints of the vLLM fork with server-wide steering, over the same state."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from midstream.compat.vllm_fork import read_clamps, unpacked
from midstream.errors import HttpError, SpecError
from midstream.plan.forms import PhaseLike
from midstream.plan.operations import Edit, Steer
from midstream.plan.tap_lookup import find_taps
from midstream.plan.vectors.vector import Vector
from midstream.server.routes.common import (
    AdminDep,
    MidstreamRoute,
    ServerDep,
    error_responses,
    ok_response,
)
from midstream.server.routes.uploads import by_value
from midstream.server.routes.vectors import ABOUT, register_name, remove_name
from midstream.server.server import Server, record_steering
from midstream.sites import order
from midstream.steering.edit_forms import TIERS, read_hooks
from midstream.validation import at

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: as elsewhere"])

# The fork's tiers, and midstream's.
_TIERS = {"vectors": "base", "prefill_vectors": "prompt", "decode_vectors": "generated"}
_HOOK_POINTS = {"resid_pre": "pre_attn", "resid_mid": "post_attn", "resid_post": "post_block"}
_HOOKS = (
    '`{hook point: {layer: vector}}`; a vector is a list of numbers or `{"vector": …, "scale": …}`'
    "; or packed, per hook point"
)
_CLAMPS = (
    '`{hook point: {layer: [clamp, …]}}`; a clamp is `{"vector": …, "min": …, "max": …, '
    '"value": …, "strength": …}`; or packed, per hook point'
)


class VectorsBody(BaseModel):
    """Vectors by hook point (`pre_attn`, `post_attn`, `post_block`) and layer."""

    model_config = ConfigDict(extra="forbid")

    vectors: Any = Field(
        default=None,
        description=f"For every token: {_HOOKS}.",
        examples=[{"post_block": {"15": [0.1, -0.2]}}],
    )
    prefill_vectors: Any = Field(default=None, description="For the tokens of prompts.")
    decode_vectors: Any = Field(default=None, description="For generated tokens.")
    clamps: Any = Field(default=None, description=f"For every token, after vectors: {_CLAMPS}.")
    prefill_clamps: Any = Field(default=None, description="For the tokens of prompts.")
    decode_clamps: Any = Field(default=None, description="For generated tokens.")
    replace: bool = Field(default=False, description="Whether to clear the tiers left out.")


class Module(BaseModel):
    """Vectors with a name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(examples=["cheerful"])
    vectors: Any = Field(description=_HOOKS, examples=[{"post_block": {"15": [0.1, -0.2]}}])


class Name(BaseModel):
    """A name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(examples=["cheerful"])


@router.post(
    "/v1/steering/set",
    summary="Set vectors for every request",
    description="Tiers that are left out are unchanged, unless `replace` is true.",
    responses=ok_response(
        {"status": "ok", "layers_updated": [15], "epoch": 3}, 400, 401, 403, 413, 503
    ),
)
def set_vectors(body: VectorsBody, server: AdminDep) -> dict[str, Any]:
    tiers: dict[str, Any] = {}
    for name, tier in _TIERS.items():
        edits = _read_tier(body, name, TIERS[tier])
        if edits is not None:
            tiers[tier] = edits
        elif body.replace:
            tiers[tier] = []
    if not tiers:
        raise SpecError(
            "vectors",
            "no tier is given; give vectors, prefill_vectors or decode_vectors, or clamps",
        )
    state = server.llm.steering.set(**tiers)
    record_steering(state)
    changed = {
        layer for tier in tiers for edit in getattr(state, tier) for _, layer in _taps(edit, server)
    }
    return {"status": "ok", "layers_updated": sorted(changed), "epoch": state.epoch}


def _read_tier(body: VectorsBody, name: str, phase: PhaseLike | None) -> list[Edit] | None:
    """Return the edits of a tier: its vectors, then its clamps; None if neither is given."""
    clamps_name = name.replace("vectors", "clamps")
    vectors, clamps = getattr(body, name), getattr(body, clamps_name)
    if vectors is None and clamps is None:
        return None
    edits: list[Edit] = []
    if vectors is not None:
        with at(name):
            edits += [part.edit for part in read_hooks(unpacked(vectors), phase)]
    if clamps is not None:
        with at(clamps_name):
            edits += read_clamps(clamps, phase)
    return edits


@router.post(
    "/v1/steering/clear",
    summary="Clear all tiers",
    responses=ok_response({"status": "ok", "epoch": 4}, 401, 403, 503),
)
def clear(server: AdminDep) -> dict[str, Any]:
    state = server.llm.steering.clear()
    record_steering(state)
    return {"status": "ok", "epoch": state.epoch}


@router.get(
    "/v1/steering",
    summary="Show active steering",
    description="Norms of the added vectors by layer, site and tier; `active_layers` has the "
    "fork's names of hook points in place of sites. Edits of other kinds are "
    "shown by `/v1/midstream/steering` only.",
    responses={
        **ok_response(
            {
                "steering": {"15": {"resid_post": {"vectors": 3.0}}},
                "active_layers": {"15": {"post_block": {"vectors": 3.0}}},
                "epoch": 3,
            }
        ),
        **error_responses(401, 503),
    },
)
def show(server: ServerDep) -> dict[str, Any]:
    state = server.llm.steering.show()
    added: dict[tuple[int, str, str], Any] = {}
    for theirs, tier in _TIERS.items():
        for edit in getattr(state, tier):
            if not isinstance(edit, Steer) or edit.norm is not None or edit.rows:
                continue
            # Active edits hold their vectors by value.
            assert isinstance(edit.vector, Vector)
            vector = edit.vector.numpy().astype("f8") * edit.scale
            for site, layer in _taps(edit, server):
                place = (layer, site, theirs)
                added[place] = added.get(place, 0.0) + vector
    active: dict[str, dict[str, dict[str, float]]] = {}
    for (layer, site, theirs), vector in added.items():
        norms = active.setdefault(str(layer), {}).setdefault(site, {})
        norms[theirs] = float(np.linalg.norm(vector))
    theirs_by_layer = {
        layer: {_HOOK_POINTS.get(site, site): norms for site, norms in sites.items()}
        for layer, sites in active.items()
    }
    return {"steering": active, "active_layers": theirs_by_layer, "epoch": state.epoch}


def _taps(edit: Edit, server: Server) -> tuple[tuple[str, int], ...]:
    return find_taps(edit.layers, edit.sites, server.llm.info.shape, "layer", "site")


@router.get(
    "/v1/steering/layers",
    summary="List the layers and sites that can be steered",
    responses=ok_response({"layers": {"15": ["resid_post"]}, "hidden_size": 576}, 401, 503),
)
def layers(server: ServerDep) -> dict[str, Any]:
    shape = server.llm.info.shape
    sites: dict[str, list[str]] = {}
    for site, layer in sorted(shape.taps, key=order):
        sites.setdefault(str(layer), []).append(site)
    return {"layers": sites, "hidden_size": shape.hidden_size}


@router.get(
    "/v1/steering/modules",
    summary="List named vectors",
    responses=ok_response({"modules": [ABOUT]}, 401, 503),
)
def modules(server: ServerDep) -> dict[str, Any]:
    return {"modules": [module.to_dict() for module in server.llm.vectors.list()]}


@router.post(
    "/v1/steering/modules/register",
    summary="Register named vectors",
    description="They apply to every token: names have no tiers here.",
    responses=ok_response({"status": "ok", **ABOUT}, 400, 401, 403, 413, 503, 507),
)
def register(module: Module, server: AdminDep) -> dict[str, Any]:
    vectors = by_value(module.vectors)
    with at("vectors"):
        vectors = unpacked(vectors)
    return {"status": "ok", **register_name(server, module.name, vectors)}


@router.post(
    "/v1/steering/modules/unregister",
    summary="Remove named vectors",
    responses=ok_response({"status": "ok", "name": "cheerful"}, 400, 401, 403, 404, 413, 503),
)
def unregister(module: Name, server: AdminDep) -> dict[str, Any]:
    remove_name(server, module.name)
    return {"status": "ok", "name": module.name}


@router.post("/v1/steering/vectors", include_in_schema=False)
def vectors_elsewhere() -> None:
    raise HttpError(
        404,
        "there is no /v1/steering/vectors; POST /v1/steering/modules/register or PUT "
        "/v1/midstream/vectors/{name} register vectors, POST /v1/steering/set steers with them",
    )


@router.post("/v1/steering/dynamic", include_in_schema=False)
def dynamic_elsewhere() -> None:
    raise HttpError(
        404,
        "dynamic steering of running requests is unsupported; PUT /v1/midstream/steering changes "
        "the steering of later requests, and an edit `gate` steers by a probe within a request",
    )
