"""Probes that end their request or switch its edits, as the engine core evaluates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from midstream.errors import SpecError
from midstream.plan import ResolvedPlan, Stop, Switch
from midstream.plan.control.act import Condition
from midstream.plan.positions.position_set import Where
from midstream.plan.scores.rule import PLAIN, ScoreRule
from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.protocol.control import control_source
from midstream.runtime.protocol.plan_version import PlanVersion


class ActingProbe(ProtocolMessage, frozen=True, array_like=True):
    """One probe. `version` holds once it is met; None: it ends the request."""

    name: str
    slot: Natural  # the first of its numbers
    where: Where
    condition: Condition
    version: PlanVersion | None = None
    rule: ScoreRule = PLAIN  # its scores are single numbers


def acting_probes(
    plan: ResolvedPlan, versions: Mapping[str, PlanVersion] = MappingProxyType({})
) -> tuple[ActingProbe, ...]:
    """Return the probes of a plan that end their request, or switch to one of `versions`."""
    probes = []
    for probe in plan.probes:
        act = probe.act
        if not isinstance(act, (Stop, Switch)):
            continue
        bare = Condition(above=act.above, below=act.below, for_=act.for_, pool=act.pool)
        version = versions[probe.name] if isinstance(act, Switch) else None
        slot = probe.slots.start
        probes.append(ActingProbe(probe.name, slot, probe.where, bare, version, probe.act_rule))
    return tuple(probes)


def probe_source(name: str) -> str:
    """Return the stop reason of a probe, and the source of the version that it switches to."""
    return f"probe:{name}"


def check_stop_strings(
    acts: Sequence[ActingProbe], controller: str | None, strings: str | Sequence[str] | None
) -> None:
    """Check that no stop string reads like the stop reason of a probe or of a controller."""
    known = {strings} if isinstance(strings, str) else set(strings or ())
    for probe in acts:
        if probe.version is None and probe_source(probe.name) in known:
            raise SpecError(
                "stop",
                f"`{probe_source(probe.name)}` is the stop reason of the probe `{probe.name}`; use "
                "another name for the probe",
            )
    if controller is not None and control_source(controller) in known:
        raise SpecError(
            "stop",
            f"`{control_source(controller)}` is the stop reason of the controller; use another "
            "name for it",
        )
