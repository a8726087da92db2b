"""A full arena that drops rows: some requests lose theirs, so that the others keep all of them."""

import random

import pytest
from support.fake_steps import TAPS, Fake, FakeEngine, captured
from support.nightly import rounds
from support.plans import plan_of, random_plan
from support.stored import SEGMENT, check_idle, make_arena

EVERYWHERE = ((0, None),)
ALL = plan_of(captures=[(list(TAPS), EVERYWHERE)])


def small(segments: int, lag: int | None = None, seed: int = 0) -> FakeEngine:
    arena = make_arena(segments * SEGMENT, "drop")
    return FakeEngine(seed, lag, arena=arena, max_tokens=256, ring_rows=256 * len(TAPS))


def ended(engine: FakeEngine, fakes: list[Fake]) -> list[int]:
    """How many rows each request lost, after holding those that it has against the reader's."""
    lost = []
    for fake in fakes:
        engine.session.requests.finish([fake.id])
        (request,) = engine.take(fake.id)
        assert request.problem == ""
        found = captured(request)
        assert all((found[key] == fake.rows[key]).all() for key in found)
        assert request.dropped == len(fake.rows) - len(found)
        lost.append(request.dropped)
    return lost


@pytest.mark.parametrize("lag", [None, 0, 3])
def test_the_newest_requests_lose_their_rows_and_the_others_none(lag):
    # One segment has 42 records, two have 84: those of four of the six prompts.
    engine = small(2, lag)
    fakes = [Fake(f"r{n}", ALL) for n in range(6)]
    for fake in fakes:
        engine.add(fake)
    # In another order than they came: the oldest keep theirs all the same.
    engine.step([(fake, 16) for fake in reversed(fakes)])
    for _ in range(2):
        engine.step([(fake, 1) for fake in fakes])
    assert ended(engine, fakes) == [0, 0, 0, 0, 18 * len(TAPS), 18 * len(TAPS)]


@pytest.mark.parametrize("seed", range(rounds(suite=1, nightly=40)))
def test_whatever_fits_is_right_and_what_does_not_is_counted(seed):
    draw = random.Random(seed)
    engine = small(draw.randint(1, 3), draw.choice([None, 0, 2]), seed)
    running, losses = [], []
    for nth in range(60):
        if len(running) < 8 and draw.random() < 0.5:
            running.append(Fake(f"r{nth}", random_plan(draw, 40) or ALL))
            engine.add(running[-1])
        batch = [(fake, draw.randint(1, 12)) for fake in running if draw.random() < 0.7]
        if batch:
            engine.step(batch)
        over = [fake for fake in running if fake.computed > 40]
        losses += ended(engine, over)
        running = [fake for fake in running if fake not in over]
    losses += ended(engine, running)
    assert 0 in losses
    check_idle(engine.arena)
