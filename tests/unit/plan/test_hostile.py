"""Whatever is wrong with a plan, the parser says so, shortly, and does nothing else."""

import random
from collections import Counter

from support.hostile import DEFECTS, good_plan, hostile_plans
from support.nightly import rounds

from midstream.errors import SpecError
from midstream.plan import Plan

COUNT = rounds(suite=1_500, nightly=100_000)


def _refusal(plan) -> str:
    """What is said of a plan; nothing if it is taken."""
    try:
        Plan.parse(plan)
    except SpecError as error:
        return str(error)
    return ""


def test_the_plans_that_are_spoilt_here_are_good_before():
    draw = random.Random(5)
    for _ in range(100):
        plan = Plan.parse(good_plan(draw, 4, 3, 6))
        assert Plan.parse(plan.to_json()) == plan


def test_every_malformed_plan_is_refused_by_name_and_shortly():
    refused: Counter[str] = Counter()
    for kind, plan in hostile_plans(2026, COUNT):
        message = _refusal(plan)
        assert 0 < len(message) < 1500, f"{kind}: {plan!r} gave {message!r}"
        refused[kind] += 1
    assert set(refused) == {kind for kind, _ in DEFECTS}
