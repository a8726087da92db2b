"""A request that was admitted."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.runtime.frontend.request.sink_routes import Route
from midstream.spec import Plan, ResolvedPlan


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request under way that asks for something.

    Attributes:
        uid: names the request for midstream, whatever ids vLLM makes of it.
        plan: what it asks for, made concrete.
        own: what it asks for itself, as written; None: nothing but what is for all requests.
        routes: where its captured rows go.
    """

    uid: str
    plan: ResolvedPlan
    own: Plan | None = None
    routes: tuple[Route, ...] = ()
