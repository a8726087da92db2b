"""Probes that end their request, as the engine core evaluates them."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import SpecError
from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.spec import ResolvedPlan, Stop
from midstream.spec.act import Condition
from midstream.spec.positions.position_set import Where


class ActingProbe(ProtocolMessage, frozen=True, array_like=True):
    """One probe.

    Attributes:
        name: name of the probe.
        slot: column of its scores.
        where: the positions that it selects.
        condition: the condition on their scores.
    """

    name: str
    slot: Natural
    where: Where
    condition: Condition


def acting_probes(plan: ResolvedPlan) -> tuple[ActingProbe, ...]:
    """Return the probes of a plan that end their request."""
    return tuple(
        ActingProbe(probe.name, probe.slot, probe.where, probe.act)
        for probe in plan.probes
        if isinstance(probe.act, Stop)
    )


def stop_reason(name: str) -> str:
    """Return the stop reason of a completion that a probe ended."""
    return f"probe:{name}"


def check_stop_strings(acts: Sequence[ActingProbe], strings: str | Sequence[str] | None) -> None:
    """Check that no stop string reads like the stop reason of a probe.

    Raises:
        SpecError: one does.
    """
    known = {strings} if isinstance(strings, str) else set(strings or ())
    for probe in acts:
        if stop_reason(probe.name) in known:
            raise SpecError(
                "stop",
                f"`{stop_reason(probe.name)}` is the stop reason of the probe `{probe.name}`; use "
                "another name for the probe",
            )
