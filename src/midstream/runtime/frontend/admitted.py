"""A request that passed request validation."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.spec import Plan, ResolvedPlan


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A running request that has a plan.

    Attributes:
        uid: midstream's id of the request. vLLM may give the request several ids of its own.
        plan: its plan, resolved.
        own: its own plan, as given; None: only edits and captures of every request apply.
        routes: destinations of its captured rows.
    """

    uid: str
    plan: ResolvedPlan
    own: Plan | None = None
    routes: tuple[SinkRoute, ...] = ()
