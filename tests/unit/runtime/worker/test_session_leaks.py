"""Thousands of requests, of which some are given up: nothing of any of them is left behind."""

import gc
import random
import tracemalloc

import pytest
from support.fake_steps import FakeEngine, view_of
from support.nightly import rounds
from support.plans import plan_of, random_plan

from midstream.plan import Vector
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.worker import plan_table

POST = ("resid_post", 1)


def many_plans(count):
    """Different plans, as they travel."""
    draw = random.Random(7)
    found = []
    while len(found) < count:
        plan = random_plan(draw, 8)
        if plan is not None:
            found.append(to_bytes(plan))
    vectors = [Vector.parse([float(n), 1.0, 2.0, 3.0]) for n in range(20)]
    return found + [to_bytes(plan_of([(POST, vector, 1.0, ((0, None),))])) for vector in vectors]


def assert_empty(session):
    """Every kind of thing that a request takes is free."""
    session.check_integrity()
    tables, slots, recorder = session._tables, session.requests._slots, session._recorder
    assert tables.in_use == 0
    session.requests.plans.drop_unused()
    tables.drop_unused()
    assert tables.instructions.bank.used == tables.instructions.lists.used == 0
    assert tables.instructions.ranges.free == tables.instructions.ranges.size
    assert not tables._programs
    assert not tables._groups
    assert len(tables._free_programs) == tables._rows - 2
    assert len(tables._free_groups) == tables._rows - 1
    assert len(slots) == 0
    assert not slots._slot_of
    assert not slots.states._states.any()
    assert sorted(slots._free) == list(range(len(slots._by_slot)))
    assert all(request is None for request in slots._by_slot)
    assert not session.requests._finished
    assert not session.requests._finishing
    assert not recorder._in_flight
    assert len(recorder.rows) == len(recorder.scores) == 0


@pytest.mark.parametrize("lag", [None, 3])
def test_thousands_of_requests_come_and_go_and_leave_nothing_behind(lag):
    engine = FakeEngine(lag=lag, max_model_len=16, bank_rows=96, programs=400, max_edits=1500)
    session, draw = engine.session, random.Random(1)
    packed = many_plans(60)
    made = 0
    fates = dict.fromkeys(("ended", "aborted", "taken as it ran", "never ran"), 0)
    while made < rounds(suite=500, nightly=20_000):
        fate = {f"r{made + n}": "never ran" for n in range(50)}
        for name in fate:
            session.requests.add(name, f"u{name}", draw.choice(packed))
        made += len(fate)
        for step in range(2):
            running = [name for name, now in fate.items() if now in ("never ran", "runs")]
            chosen = [name for name in running if draw.random() < 0.8]
            count = [1] * len(chosen)
            session.before_forward(view_of(chosen, count, [step] * len(chosen), count))
            engine.forward(len(chosen))
            session.after_forward()
            fate |= dict.fromkeys(chosen, "runs")
            for name in running[::7]:
                session.requests.finish([name])
                fate[name] = "aborted"
        names = list(fate)
        draw.shuffle(names)
        for name in names:
            if fate[name] == "runs":
                fate[name] = draw.choice(["ended", "taken as it ran"])
                if fate[name] == "ended":
                    session.requests.finish([name])
            fates[fate[name]] += 1
        for start in range(0, len(names), 10):
            taken = engine.take_many([f"u{name}" for name in names[start : start + 10]])
            for uid, found in taken.items():
                assert [one.uid for one in found] == [uid]
                assert found[0].problem == ""
        session.check_integrity()
    assert all(fates.values())
    assert len(session.requests._slots._by_slot) <= 64, "slots are not used again"
    assert_empty(session)


def test_memory_is_the_same_after_hundreds_of_requests_with_plans_of_their_own(monkeypatch):
    monkeypatch.setattr(plan_table, "_CACHED_PLANS", 64)
    engine = FakeEngine(max_model_len=16)
    session = engine.session

    def serve(first, count):
        """Requests of one probe each, with names of their own, in batches of 20."""
        for begin in range(first, first + count, 20):
            names = [f"r{begin + nth}" for nth in range(20)]
            for name in names:
                plan = plan_of(
                    captures=[([POST], ((0, None),))], probes=[(name, POST, ((0, None),))]
                )
                session.requests.add(name, f"u{name}", to_bytes(plan))
            session.before_forward(view_of(names, [2] * 20, [0] * 20, [1] * 40))
            engine.forward(40)
            session.after_forward()
            for name in names:
                session.requests.finish([name])
            engine.take_many([f"u{name}" for name in names])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(0, 200)  # more than the plans that are kept unpacked
        assert serve(200, 200) - before < 15_000
    finally:
        tracemalloc.stop()
    assert_empty(session)
