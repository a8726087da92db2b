"""What the server is, and how it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from midstream.serving.routes.common import Route, refused, server_of
from midstream.serving.server import Server

router = APIRouter(route_class=Route, tags=["midstream: status"])
Here = Annotated[Server, Depends(server_of)]


@router.get(
    "/v1/midstream/sites",
    summary="Every site of every layer: tapped, or why not",
    responses=refused(401, 503),
)
def sites(server: Here) -> dict[str, Any]:
    table = server.llm.sites()
    shape = server.llm.info.shape
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "sites": [asdict(one) for one in table.states],
    }


@router.get(
    "/v1/midstream/status",
    summary="Versions, settings, and what is in use",
    responses=refused(401, 503),
)
async def status(server: Here) -> dict[str, Any]:
    return await server.state()
