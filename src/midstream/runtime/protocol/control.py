"""A request's controller, as the engine core runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.plan import ResolvedPlan
from midstream.plan.control.controller import Controller
from midstream.plan.positions.position_set import Where
from midstream.plan.scores.rule import PLAIN, ScoreRule
from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.protocol.plan_version import PlanVersion


class VersionChoice(ProtocolMessage, frozen=True, array_like=True):
    """A version that a controller may choose. `edits` names a set; empty: the request's own."""

    edits: str
    scale: float
    version: PlanVersion


class ReadProbe(ProtocolMessage, frozen=True, array_like=True):
    """A probe whose scores a controller is given."""

    name: str
    slot: Natural  # the first of its numbers
    where: Where
    rule: ScoreRule = PLAIN


class Control(ProtocolMessage, frozen=True, array_like=True):
    """A request's controller. Choices are the plan as sent, it with strength 0, and the versions 1,
    2, …, numbered again, on top of all, since a failure.
    """

    name: str
    law: Mapping[str, Any]  # parameters of a `Threshold`; empty: it is declared
    declared: str  # name of the declared controller; empty: it is a `Threshold`
    on_error: str  # what happens if it fails: "keep", "off" or "end"
    probes: tuple[ReadProbe, ...]
    choices: tuple[VersionChoice, ...]


def control_of(
    controller: Controller, on_error: str, plan: ResolvedPlan, choices: tuple[VersionChoice, ...]
) -> Control:
    law = controller.law
    probes = [
        ReadProbe(probe.name, probe.slots.start, probe.where, probe.rule)
        for probe in plan.probes
        if probe.name and probe.source >= 0
    ]
    return Control(
        name=controller.name,
        law={} if law is None else law.to_dict(),
        declared=str(controller.decide) if law is None else "",
        on_error=on_error,
        probes=tuple(probes),
        choices=choices,
    )


def control_source(name: str, edits: str = "", has_failed: bool = False) -> str:
    """Return the source of a version that a controller chose, of a named set of edits or ""."""
    chosen = f"controller:{name}/{edits}" if edits else f"controller:{name}"
    return f"{chosen} failed" if has_failed else chosen
