"""Probes that act while their request runs: their place, and the versions that they switch to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.plan import Flag, Plan, ResolvedPlan, Switch
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
) -> PreparedPlan:
    """Return a prepared plan with its acting probes; its need is that of all versions together."""
    later: dict[int, LaterPlan] = {}
    versions: dict[str, PlanVersion] = {}
    needs = [prepared.need]
    for index, probe in enumerate(() if plan is None else plan.probes):
        if not isinstance(probe.act, Switch):
            continue
        assert plan is not None
        with at(f"probes[{index}].act.switch"):
            check_edits_can_change(plan)
            bare = tuple(plan_probe.replace(act=None) for plan_probe in plan.probes)
            edits = probe.act.edits
            origins = probe.act.origins if edits else ()
            later_plan = replace(plan, edits=edits, probes=bare, origins=origins)
            version = prepare(replace(later_plan, searched=plan.marked))
            check_same_reads(prepared.plan, version.plan)
        number = 1 + len(later)
        later[number] = LaterPlan(version.plan, probe_source(probe.name), 1.0)
        versions[probe.name] = PlanVersion(number, version.packed, version.keys)
        needs.append(version.need)
    acts = acting_probes(prepared.plan, versions)
    if not later:
        return replace(prepared, acts=acts)
    return replace(prepared, acts=acts, later=later, need=joint_need(needs, room))


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
