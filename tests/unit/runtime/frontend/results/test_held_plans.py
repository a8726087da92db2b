"""Which version of a plan held at which positions."""

from types import SimpleNamespace
from typing import Any

from midstream.plan import ResolvedPlan
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.frontend.results.held_plans import held_plans

PLANS = [ResolvedPlan(3, (), (), codec=str(nth)) for nth in range(4)]
LATER = {nth: LaterPlan(PLANS[nth], "update", 1.0) for nth in range(1, 4)}


def held(*versions: tuple[tuple[int, int], ...], length: int = 20) -> Any:
    parts: Any = [
        SimpleNamespace(versions=one, worker=SimpleNamespace(place=str(nth)))
        for nth, one in enumerate(versions)
    ]
    found, problems = held_plans(PLANS[0], LATER, parts, length)
    assert all(one.plan is PLANS[one.number] for one in found)
    return [(one.number, one.start, one.stop) for one in found], problems


def test_a_version_holds_until_the_next_begins() -> None:
    assert held(()) == ([(0, 0, 20)], [])
    assert held() == ([(0, 0, 20)], [])
    assert held(((1, 5), (2, 9))) == ([(0, 0, 5), (1, 5, 9), (2, 9, 20)], [])
    # Two between the same steps, one back by rejected drafts, and one after the last row.
    assert held(((1, 5), (2, 5))) == ([(0, 0, 5), (1, 5, 5), (2, 5, 20)], [])
    assert held(((1, 8), (2, 6))) == ([(0, 0, 6), (1, 6, 6), (2, 6, 20)], [])
    assert held(((1, 25),)) == ([(0, 0, 20), (1, 20, 20)], [])


def test_workers_that_differ_and_versions_that_nobody_sent_are_problems() -> None:
    found, problems = held(((1, 5),), ((1, 6),))
    assert found == [(0, 0, 5), (1, 5, 20)]
    assert problems == ["its plan was changed at other positions on workers 0 and 1"]
    found, problems = held(((1, 5), (7, 8)))
    assert found == [(0, 0, 5), (1, 5, 20)]
    assert problems == ["the workers had a version 7 of its plan, which nobody sent"]
