"""Which version of a request's plan held at which positions, as the workers report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midstream.plan import ResolvedPlan
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.protocol.results import WorkerResult


@dataclass(frozen=True, slots=True)
class HeldPlan:
    """A version of a plan, and the positions [start, stop) at which it held."""

    number: int  # 0: the plan with which the request was sent
    plan: ResolvedPlan
    start: int
    stop: int
    later: LaterPlan | None = None  # None: it is version 0


def held_plans(
    first: ResolvedPlan,
    later: Mapping[int, LaterPlan],
    parts: Sequence[WorkerResult],
    length: int,
) -> tuple[list[HeldPlan], list[str]]:
    """Return the versions of one completion's plan, in order, and the problems."""
    reported = parts[0].versions if parts else ()
    problems = []
    for part in parts[1:]:
        if part.versions != reported:
            problems.append(
                f"its plan was changed at other positions on workers {parts[0].worker.place} and "
                f"{part.worker.place}"
            )
    unknown = [number for number, _ in reported if number not in later]
    if unknown:
        problems.append(f"the workers had a version {unknown[0]} of its plan, which nobody sent")
    known = [(number, position) for number, position in reported if number in later]
    plans: list[HeldPlan] = []
    stop = length
    # A version ends where a later one begins, also if that is before its own first position:
    # positions of rejected drafts belong to nobody.
    for number, position in reversed(known):
        start = min(position, stop)
        plans.append(HeldPlan(number, later[number].plan, start, stop, later[number]))
        stop = start
    plans.append(HeldPlan(0, first, 0, stop))
    return plans[::-1], problems
