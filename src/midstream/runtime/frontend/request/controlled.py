"""Controllers in the engine core: the versions of a request's plan that they may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from midstream.config.controllers import DeclaredController
from midstream.errors import SpecError
from midstream.plan import Plan
from midstream.plan.control.control_laws import MOST_SCALES
from midstream.plan.control.controller import Controller, EditSet
from midstream.plan.operations.strength import with_strength
from midstream.plan.positions.work import check_overlaps, check_taps
from midstream.plan.resolve.resolve import weighed
from midstream.runtime.frontend.request.prepared_plan import LaterPlan, PreparedPlan
from midstream.runtime.frontend.request.same_reads import check_edits_can_change, check_same_reads
from midstream.runtime.frontend.request.switches import joint_need
from midstream.runtime.protocol.control import VersionChoice, control_of, control_source
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.segments import Room
from midstream.validation import at, listed, show


def with_controller(
    prepared: PreparedPlan,
    plan: Plan | None,
    prepare: Callable[[Plan], PreparedPlan],
    room: Room,
    declared: Mapping[str, DeclaredController],
) -> PreparedPlan:
    """Return a prepared plan with its controller; its need is that of all choices together."""
    controller = None if plan is None else plan.controller
    if plan is None or controller is None:
        return prepared
    with at("controller"):
        check_edits_can_change(plan)
        scales, on_error = _read(controller, declared)
        sets = (EditSet("", plan.edits, plan.origins), *controller.edits)
        if len(sets) * len(scales) > MOST_SCALES:
            raise SpecError(
                "",
                f"it chooses from {len(scales)} scales of {len(sets)} sets of edits, and the limit "
                f"is {MOST_SCALES} versions; use fewer",
            )
        of_plan = len(prepared.plan.edits) + len(prepared.plan.probes)
        of_plan += sum(len(capture.taps) for capture in prepared.plan.captures)
        check_taps(
            len(scales) * (len(sets) * of_plan + sum(len(candidate.edits) for candidate in sets))
        )
        check_overlaps(weighed(prepared.plan), len(sets) * len(scales))
    bare = replace(plan, probes=tuple(probe.replace(act=None) for probe in plan.probes))
    bare = replace(bare, controller=None, searched=plan.marked)
    choices: list[VersionChoice] = []
    later: dict[int, LaterPlan] = {}
    needs = [prepared.need]
    for edit_set in sets:
        for scale in scales:
            prepared_version = _version(prepared, bare, edit_set, scale, prepare)
            number = 1 + len(choices)
            version = PlanVersion(number, prepared_version.packed, prepared_version.keys)
            choices.append(VersionChoice(edit_set.name, scale, version))
            later[number] = LaterPlan(
                prepared_version.plan, control_source(controller.name, edit_set.name), scale
            )
            needs.append(prepared_version.need)
    for number in range(1, 1 + len(choices)):
        failed = control_source(controller.name, choices[number - 1].edits, has_failed=True)
        later[len(choices) + number] = replace(later[number], source=failed)
    control = control_of(controller, on_error, prepared.plan, tuple(choices))
    need = joint_need(needs, room)
    return replace(prepared, control=control, later=later, need=need)


def _read(
    controller: Controller, declared: Mapping[str, DeclaredController]
) -> tuple[tuple[float, ...], str]:
    """Return the scales that a controller may answer, 1 and 0 first, and its policy."""
    law = controller.law
    if law is not None:
        scales, on_error = law.scales(), "keep"
    else:
        name = str(controller.decide)
        declaration = declared.get(name)
        if declaration is None:
            known = f"declared are {listed(sorted(declared))}" if declared else "none is declared"
            raise SpecError(
                "",
                f"the engine has no controller {show(name)}; {known} by the setting `controllers`",
            )
        scales, on_error = declaration.scales, declaration.on_error
    return tuple(dict.fromkeys((1.0, 0.0, *scales))), controller.on_error or on_error


def _version(
    prepared: PreparedPlan,
    bare: Plan,
    chosen: EditSet,
    scale: float,
    prepare: Callable[[Plan], PreparedPlan],
) -> PreparedPlan:
    try:
        edits = with_strength(chosen.edits, scale)
        version = prepare(replace(bare, edits=edits, origins=chosen.origins if edits else ()))
        check_same_reads(prepared.plan, version.plan)
    except SpecError as error:
        if not chosen.name and scale == 1:
            raise  # an error of the request's own plan
        shown = f", scale {scale:g}" if scale != 1 else ""
        path = f"controller.edits.{chosen.name}" if chosen.name else "controller"
        raise SpecError(path, f"{error} (version of the plan{shown})") from None
    return version
