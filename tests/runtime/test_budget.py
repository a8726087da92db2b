"""The front end's reckoning of the workers' tables, against the tables themselves."""

from __future__ import annotations

import random

import pytest
from helpers.fake_steps import ROOM, TAPS, make_buffers
from helpers.plans import KINDS, VECTORS, add, plan_of, random_plan, rows
from helpers.programs import assert_free
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.runtime.budget import Budget, all_taps, need_of
from midstream.runtime.buffers import Room
from midstream.runtime.ledger import Ledger
from midstream.runtime.programs import Tables
from midstream.runtime.requests import WHOLE, acquire_segments, cut, release_segments
from midstream.spec import Match, Where

EVERYWHERE = ((0, None),)
PRE, POST = ("resid_pre", 0), ("resid_post", 1)
ALL = all_taps(TAPS)
# A stage of a pipeline: its own taps, numbered by itself.
STAGES = [list(TAPS)[:3], list(TAPS)[3:]]


def room(**changes) -> Room:
    return Room(**{**ROOM, **changes})


def need(plan, edits_per_site=64, **changes):
    return need_of(plan, ALL, room(**changes), edits_per_site)


# ---------------------------------------------------------------- what a plan takes


def test_a_plan_needs_every_distinct_thing_once():
    plan = plan_of(
        edits=[
            (PRE, VECTORS[0], 1.0, ((0, 4),)),
            (POST, VECTORS[0], 2.0, ((2, 6),)),
            (POST, VECTORS[1], 2.0, Where((), (Match(((8, None),), (3, 4)),))),
        ],
        captures=[([PRE], ((0, 2),)), ([PRE, POST], ((5, 6),))],
    )
    found = need(plan)
    # 0–1 and 2–3 and 4–5, and the generated tokens.
    assert found.total("programs") == 4
    assert found.total("max_edits") == 1 + 2 + 1 + 1
    assert found.total("bank_rows") == 2
    assert found.total("token_ids") == 2
    assert found.total("groups") == 2


def test_a_plan_that_asks_for_nothing_needs_nothing():
    found = need(plan_of())
    assert [found.total(kind) for kind in found.kinds] == [0] * 5


@pytest.mark.parametrize(
    ("plan", "changes", "problem"),
    [
        (
            plan_of(edits=[(POST, rows(5, 0), ((0, 5),))]),
            {"bank_rows": 4},
            "the request needs 5 vectors, and there is room for 4; .*setting bank_rows",
        ),
        (
            plan_of(edits=[(POST, add(), ((n, n + 2),)) for n in range(0, 6)]),
            {"programs": 3},
            "needs . combinations of edits, and there is room for 1; .*setting programs",
        ),
        (
            plan_of(captures=[([tap], ((2 * n, 2 * n + 1),)) for n, tap in enumerate(TAPS)]),
            {"programs": 4},
            "needs 6 combinations of captures, and there is room for 3; .*setting programs",
        ),
        (
            plan_of(edits=[(POST, KINDS[5], EVERYWHERE)] * 2),
            {"max_edits": 3},
            "needs 4 instructions, and there is room for 3; .*setting max_edits",
        ),
        (
            plan_of(edits=[(POST, add(), Where((), (Match(EVERYWHERE, (1, 2, 3)),)))]),
            {"token_ids": 2},
            "needs 3 token ids in lists, and there is room for 2; .*setting token_ids",
        ),
        (
            plan_of(probes=[(f"p{n}", POST, EVERYWHERE) for n in range(3)]),
            {"probes": 2},
            "probes: the request reads 3 scores .* room for 2; .*setting probes",
        ),
        (
            plan_of(
                edits=[
                    (POST, KINDS[5], ((0, 4),)),
                    (POST, add(), ((3, 5),)),
                    (PRE, add(), ((0, 9),)),
                ]
            ),
            {"edits_per_site": 2},
            "edits: 3 instructions for one token at resid_post of layer 1 .* limit is 2; "
            ".*setting edits_per_site",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_the_figures_and_the_setting(plan, changes, problem):
    with pytest.raises(SpecError, match=problem):
        need(plan, **changes)


def test_what_just_fits_is_not_refused():
    assert need(plan_of(edits=[(POST, rows(4, 0), ((0, 4),))]), bank_rows=4)
    assert need(plan_of(edits=[(POST, add(), EVERYWHERE)]), programs=3)
    assert need(plan_of(probes=[("p", POST, EVERYWHERE)] * 1), probes=1)
    assert need(plan_of(edits=[(POST, KINDS[5], EVERYWHERE)]), edits_per_site=2, max_edits=2)
    # Instructions at different sites, or for different tokens, are not beside each other.
    apart = plan_of(
        edits=[(POST, add(), ((0, 4),)), (POST, add(), ((4, 8),)), (PRE, add(), EVERYWHERE)]
    )
    assert need(apart, edits_per_site=1)


# ---------------------------------------------------------------- what is taken, and given back


def test_what_plans_share_is_counted_once_and_held_by_the_last_of_them():
    budget = Budget(room(bank_rows=2))
    one = need(plan_of(edits=[(POST, VECTORS[0], 1.0, EVERYWHERE)]))
    other = need(
        plan_of(edits=[(POST, VECTORS[0], 1.0, ((0, 3),)), (PRE, VECTORS[1], 1.0, ((1, 2),))])
    )
    third = need(plan_of(edits=[(POST, VECTORS[2], 1.0, EVERYWHERE)]))
    budget.take(one)
    assert budget.fits(other)
    budget.take(other)
    assert budget.used["bank_rows"] == 2
    assert not budget.fits(third)
    budget.give_back(one)
    assert budget.used["bank_rows"] == 2
    assert not budget.fits(third)
    budget.give_back(other)
    assert budget.fits(third)
    assert set(budget.used.values()) == {0}


class Worker:
    """The tables of one pipeline stage, with the plans that run there."""

    def __init__(self, taps, settings_):
        self.taps = {tap: nth for nth, tap in enumerate(taps)}
        changes = {name: getattr(settings_, name) for name in ROOM}
        self.tables = Tables(make_buffers(taps, **changes))
        self.ledger = Ledger()
        self.running = {}

    def start(self, name, plan):
        pieces = cut(plan, self.taps, WHOLE)
        self.running[name] = acquire_segments(pieces, self.tables, self.ledger)

    def stop(self, name):
        release_segments(self.running.pop(name), self.tables)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([[list(TAPS)], STAGES]),
    st.fixed_dictionaries(
        {
            "bank_rows": st.integers(4, 24),
            "programs": st.integers(6, 20),
            "max_edits": st.integers(8, 60),
            "token_ids": st.integers(3, 10),
        }
    ),
)
def test_what_the_budget_lets_in_the_tables_of_every_stage_have_room_for(seed, stages, sizes):
    draw = random.Random(seed)
    size = room(**sizes)
    budget = Budget(size)
    workers = [Worker(taps, size) for taps in stages]
    plans = [plan for plan in (random_plan(draw, 12) for _ in range(12)) if plan is not None]
    running = {}
    admitted = waiting = 0
    for nth in range(60):
        if running and draw.random() < 0.45:
            name = draw.choice(list(running))
            for worker in workers:
                worker.stop(name)
            budget.give_back(running.pop(name))
            continue
        plan = draw.choice(plans)
        try:
            wanted = need_of(plan, ALL, size, 64)
        except SpecError:
            continue
        if not budget.fits(wanted):
            waiting += 1
            assert running, "with nobody inside there is room for whatever is not refused"
            continue
        admitted += 1
        budget.take(wanted)
        running[nth] = wanted
        for worker in workers:
            worker.start(nth, plan)  # raises where there is no room
        if len(workers) == 1:
            tables = workers[0].tables
            assert budget.used["bank_rows"] == tables.used_rows
            assert budget.used["programs"] == len(tables._programs)
            assert budget.used["groups"] == len(tables._groups)
            assert budget.used["token_ids"] == tables._lists.used
            assert budget.used["max_edits"] == (
                tables._instructions.size - tables._instructions.free
            )
    for name, taken in running.items():
        budget.give_back(taken)
        for worker in workers:
            worker.stop(name)
    assert set(budget.used.values()) == {0}
    for worker in workers:
        assert_free(worker.tables)


def test_random_plans_both_fit_and_wait():
    """So that the test above is of both."""
    draw = random.Random(3)
    size = room(bank_rows=10, programs=12, max_edits=20)
    budget, found = Budget(size), []
    for _ in range(80):
        plan = random_plan(draw, 12)
        if plan is None:
            continue
        try:
            wanted = need_of(plan, ALL, size, 64)
        except SpecError:
            found.append("refused")
            continue
        found.append("fits" if budget.fits(wanted) else "waits")
        if found[-1] == "fits":
            budget.take(wanted)
    assert min(found.count(each) for each in ("fits", "waits", "refused")) > 2
