"""Rows that are handed over while their requests run: each once, and the rest at the end."""

import random

import pytest
from support.fake_steps import Fake, FakeEngine, captured
from support.plans import plan_of, random_plan

POST = ("resid_post", 1)
EVERYWHERE = ((0, None),)
ALL = plan_of(captures=[([POST], EVERYWHERE)])


def hand_over(engine, stops):
    """{uid: {id: stop}}; the rows that came, by uid."""
    with engine.session.collection.collect_partial(stops) as found:
        return {
            uid: [(one.id, captured(one)) for one in requests] for uid, requests in found.items()
        }


def until(fake, stop):
    return {(tap, position): row for (tap, position), row in fake.rows.items() if position < stop}


def assert_same(mine, theirs):
    assert set(mine) == set(theirs)
    assert all((mine[key] == row).all() for key, row in theirs.items())


def run(seed, lag):
    """Chunks, decode steps and preemptions of a few requests, some of which are asked for rows."""
    draw = random.Random(seed)
    engine = FakeEngine(seed, lag=lag)
    fakes = [Fake(f"r{n}", random_plan(draw, 40) or ALL) for n in range(4)]
    got = {fake.id: {} for fake in fakes}
    reached = dict.fromkeys(got, 0)
    for fake in fakes:
        engine.add(fake)
    for _ in range(40):
        batch = [(fake, draw.randint(1, 5)) for fake in fakes if draw.random() < 0.7]
        if batch:
            engine.step(batch)
        for fake in fakes:
            reached[fake.id] = max(reached[fake.id], fake.computed)
            if draw.random() < 0.05 or fake.computed > 50:
                fake.computed = 0
                engine.add(fake)
        # Of the last there are never any before the end.
        asked = {
            fake.id: draw.randint(0, reached[fake.id]) for fake in fakes[:-1] if draw.random() < 0.3
        }
        answer = hand_over(engine, {name: {name: stop} for name, stop in asked.items()})
        for fake in fakes:
            for name, rows in answer.get(fake.id, ()):
                assert name == fake.id
                now = until(fake, asked[name])
                assert not set(rows) & set(got[name]), "a row came twice"
                assert_same(rows, {key: row for key, row in now.items() if key in rows})
                assert set(now) <= {*rows, *got[name]}, "a row that was asked for did not come"
                got[name] |= {key: row.copy() for key, row in rows.items()}
    return engine, fakes, got


@pytest.mark.parametrize(
    ("seed", "lag"), [(0, None), (2, 2), (5, 5), pytest.param(1, 0, marks=pytest.mark.nightly)]
)
def test_each_row_comes_once_while_its_request_runs_or_at_its_end(seed, lag):
    engine, fakes, got = run(seed, lag)
    assert sum(map(len, got.values())) > 50
    for fake in fakes:
        engine.session.requests.finish([fake.id])
        (request,) = engine.take(fake.id)
        assert request.problem == ""
        assert request.done.tolist() == fake.done
        rest = captured(request)
        assert not set(rest) & set(got[fake.id])
        # What was handed over before it was computed again stands as it was.
        assert_same({**rest, **got[fake.id]}, {**fake.rows, **got[fake.id]})
    engine.session.check_integrity()


def test_what_nobody_asks_for_any_more_is_free_while_the_request_runs():
    engine, fake = FakeEngine(), Fake("a", ALL)
    engine.add(fake)
    for _ in range(30):
        engine.step([(fake, 1)])
        hand_over(engine, {"a": {"a": fake.computed}})
        assert len(engine.session._recorder.rows) == 0
    segments = engine.arena.used
    assert segments["memory_bytes"] == 4096, "rows that were handed over take room"
    (request,) = engine.take("a")
    assert captured(request) == {}


def test_a_request_that_has_ended_is_handed_over_and_one_that_was_taken_is_unknown():
    engine, fake = FakeEngine(), Fake("a", ALL, uid="u")
    engine.add(fake)
    engine.step([(fake, 3)])
    engine.session.requests.finish(["a"])
    ((name, rows),) = hand_over(engine, {"u": {"a": 2, "else": 9}, "v": {"a": 3}})["u"]
    assert (name, len(rows)) == ("a", 2)
    (request,) = engine.take("u")
    assert [position for _, position in captured(request)] == [2]
    assert hand_over(engine, {"u": {"a": 3}}) == {"u": []}
    engine.session.check_integrity()


def test_the_completions_of_one_prompt_are_asked_for_one_by_one():
    engine = FakeEngine()
    fakes = [Fake(f"{n}_x", ALL, uid="u") for n in range(3)]
    for fake in fakes:
        engine.add(fake)
    engine.step([(fake, 4) for fake in fakes])
    found = dict(hand_over(engine, {"u": {"0_x": 2, "2_x": 4}})["u"])
    assert {name: len(rows) for name, rows in found.items()} == {"0_x": 2, "2_x": 4}
    rest = {request.id: len(captured(request)) for request in engine.take("u")}
    assert rest == {"0_x": 2, "1_x": 4, "2_x": 0}
