"""A version of a request's plan, as the front end knows it."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.plan import ResolvedPlan


@dataclass(frozen=True, slots=True)
class LaterPlan:
    """A version of a request's plan.

    Attributes:
        source: who changed it: "update", or "probe:NAME" or "controller:NAME".
        scale: the factor on the strength of the edits given last.
    """

    plan: ResolvedPlan
    source: str
    scale: float
