"""Probes that act while their request runs: their place, and the versions that they switch to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.plan import Flag, Plan, Probe, ResolvedPlan, Switch
from midstream.plan.plan import ServerWide
from midstream.runtime.frontend.request.budget import Need, check_tables
from midstream.runtime.frontend.request.prepared_plan import LaterPlan, PreparedPlan
from midstream.runtime.frontend.request.same_reads import check_edits_can_change, check_same_reads
from midstream.runtime.protocol.acting_probes import acting_probes, probe_source
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.segments import Room
from midstream.validation import at

if TYPE_CHECKING:
    from midstream.runtime.protocol.worker_info import WorkerInfo


def with_switches(
    prepared: PreparedPlan,
    plan: Plan | None,
    prepare: Callable[[Plan], PreparedPlan],
    room: Room,
    before: tuple[ServerWide, ...],
) -> PreparedPlan:
    """Return a prepared plan with its acting probes; its need is that of all versions together.
    `before` is server-wide; `prepare` prepares a version beside it `without_switches`.
    """
    later: dict[int, LaterPlan] = {}
    versions: dict[str, PlanVersion] = {}
    needs = [prepared.need]
    own = Plan() if plan is None else plan
    bare = tuple(probe.replace(act=None) for probe in own.probes)
    server_wide = [(f"steering[{index - len(before)}]", part) for index, part in enumerate(before)]
    for path, probe in (
        *((f"probes[{index}]", probe) for index, probe in enumerate(own.probes)),
        *((path, part) for path, part in server_wide if isinstance(part, Probe)),
    ):
        if not isinstance(probe.act, Switch):
            continue
        with at(f"{path}.act.switch"):
            check_edits_can_change(own)
            edits = probe.act.edits
            origins = probe.act.origins if edits else ()
            later_plan = replace(own, edits=edits, probes=bare, origins=origins)
            version = prepare(replace(later_plan, searched=own.marked))
            check_same_reads(prepared.plan, version.plan)
        number = 1 + len(later)
        later[number] = LaterPlan(version.plan, probe_source(probe.name), 1.0)
        versions[probe.name] = PlanVersion(number, version.packed, version.keys)
        needs.append(version.need)
    acts = acting_probes(prepared.plan, versions)
    if not later:
        return replace(prepared, acts=acts)
    return replace(prepared, acts=acts, later=later, need=joint_need(needs, room))


def without_switches(before: tuple[ServerWide, ...]) -> tuple[ServerWide, ...]:
    """Return what is server-wide with probes that switch nothing; itself if none does."""
    if not any(isinstance(part, Probe) and isinstance(part.act, Switch) for part in before):
        return before
    return tuple(
        part.replace(act=None) if isinstance(part, Probe) and isinstance(part.act, Switch) else part
        for part in before
    )


def check_switches(before: tuple[ServerWide, ...]) -> None:
    """Check that what is server-wide switches nothing of a request with a controller."""
    if without_switches(before) is not before:
        raise SpecError(
            "controller",
            "this server's guards switch the edits of requests, which can have no controller as "
            "well",
        )


def everywhere(before: tuple[ServerWide, ...]) -> tuple[ServerWide, ...]:
    """Return the probes of what is server-wide, of every token, and switching nothing."""
    probes = tuple(part for part in before if isinstance(part, Probe))
    return without_switches(
        tuple(probe.replace(positions="all", phase=None, exclude=None) for probe in probes)
    )


def joint_need(needs: Sequence[Need], room: Room) -> Need:
    """Return the capacity that all versions of a plan take together; rows: the first's."""
    kinds: dict[str, dict[Hashable, int]] = {}
    for need in needs:
        for kind, things in need.kinds.items():
            kinds[kind] = {**kinds.get(kind, {}), **things}
    total = replace(
        needs[0],
        kinds=kinds,
        vectors=tuple(dict.fromkeys(vector for need in needs for vector in need.vectors)),
        weights=tuple(dict.fromkeys(weight for need in needs for weight in need.weights)),
        sources=tuple(dict.fromkeys(source for need in needs for source in need.sources)),
    )
    check_tables(total, room)
    return total


def check_acts(plan: ResolvedPlan, is_controlled: bool, workers: Sequence[WorkerInfo]) -> None:
    """Check that a score is of one pipeline stage; for the core, of the last's first rank."""
    stages = {tap: worker.stage for worker in workers for tap in worker.taps}
    stage_of = {probe.name: stages[probe.tap] for probe in plan.probes if probe.name}
    for probe in plan.probes:
        if probe.part_of and stages[probe.tap] != stage_of[probe.part_of]:
            path = f"probes[{probe.source}].layer"
            raise SpecError(
                path if probe.source >= 0 else f"steering[{probe.source}]",
                f"layer {probe.layer} is on another pipeline stage than the last layer of the "
                "probe, and a score is added up on one; use one probe for each stage",
            )
    last = max(worker.stage for worker in workers)
    on_last = {tap for worker in workers if worker.stage == last for tap in worker.taps}
    for probe in plan.probes:
        is_acting = probe.act is not None and not isinstance(probe.act, Flag)
        is_read = is_controlled and probe.name and probe.source >= 0
        if not is_acting and not is_read:
            continue
        path = f"probes[{probe.source}]" if probe.source >= 0 else f"steering[{probe.source}]"
        path += ".act" if is_acting else ""
        what = "a probe that stops or switches" if is_acting else "a probe of a controller"
        if probe.tap not in on_last:
            raise SpecError(
                path,
                f"layer {probe.layer} is on an earlier pipeline stage; {what} reads a layer of the "
                "last one",
            )
