"""What a later version of a request's plan has in common with the first."""

from __future__ import annotations

from midstream.errors import SpecError
from midstream.plan import Plan, ResolvedPlan
from midstream.runtime.frontend.request.reconstructions import check_same_saes


def check_same_reads(first: ResolvedPlan, later: ResolvedPlan) -> None:
    """Check that a version of a plan captures, probes and remembers what its first one does."""
    if first.functions or later.functions:
        raise SpecError("edits", "a request with a Python function (Local) cannot be changed")
    named = [[probe for probe in plan.probes if probe.name] for plan in (first, later)]
    if first.captures != later.captures or named[0] != named[1]:
        raise SpecError(
            "", "the names that its captures and probes read have changed their meaning meanwhile"
        )
    scans = [[probe for probe in plan.probes if probe.is_scan] for plan in (first, later)]
    if scans[0] != scans[1]:
        raise SpecError(
            "edits",
            "gates with memory (hold, smooth, release) are those of the request from beginning to "
            "end; an update or a Switch may change the edits in them, but not their positions, and "
            "gives all of them in their order",
        )
    if first.automata != later.automata:
        raise SpecError(
            "edits",
            "the tokens of a request are searched for marks (Between) from its beginning, and not "
            "for those that only an update names; give the request an edit there, of scale 0",
        )
    check_same_saes(first, later)


def check_edits_can_change(plan: Plan) -> None:
    """Check that a request's rows do not depend on the edits that it began with."""
    if any(getattr(capture, "reuse", False) for capture in plan.captures):
        raise SpecError(
            "", "a request that reuses rows (Capture(reuse=True)) keeps the edits it began with"
        )
