"""Ordinary requests go before the runs of sweeps."""

import asyncio
from types import SimpleNamespace

import pytest
from lab.server.routes import test_fit
from lab.server.routes.test_sweep import BODY, PATH
from support.serving_fake import serving

from midstream.api.traffic import RUN_ID, Traffic
from midstream.deadlines import end_tasks, within
from midstream.server import sweep_pace

pytestmark = pytest.mark.anyio
FOREVER = 3600.0
# As many ordinary requests as there are seats, of which some have no token, and others wait.
BUSY = Traffic(requests=8, starting=3, waiting=5, seats=8)


def cells(engine):
    """The runs of sweeps that are under way."""
    return [name for name in engine.states if name.startswith(RUN_ID)]


def watched(engine):
    """How many runs of sweeps are under way at most, and their priorities, from now on."""
    seen = SimpleNamespace(most=0, priorities=set())

    async def pause():
        seen.most = max(seen.most, len(cells(engine)))
        seen.priorities.add(engine.vllm_args["priority"])
        await asyncio.sleep(0.001)

    engine.pause = pause
    return seen


async def before_first_token(client, site, body):
    """(runs that start between an ordinary request and its first token, outputs of runs then)."""
    engine, ordinary = site.engine, []
    engine.log.clear()

    async def pause():
        if not ordinary and len(engine.log) > 60:
            ordinary.append(
                asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "abc"}))
            )
        await asyncio.sleep(0.001)

    engine.pause = pause
    assert (await client.post(PATH, json=body)).status_code == 200
    assert (await ordinary[0]).status_code == 200
    begin, end = (engine.log.index((what, "cmpl-0")) for what in ("call", "output"))
    between = [what for what, name in engine.log[begin:end] if name.startswith(RUN_ID)]
    return between.count("call"), between.count("output")


async def test_an_ordinary_request_has_its_first_token_before_any_further_run_starts(monkeypatch):
    body = {**BODY, "prompt": "a" * 60, "source": "b" * 60, "layers": [0, 1]}
    async with serving() as (site, client):
        site.engine.limit_seats(8)
        site.server.sweeps.wait_seconds = FOREVER
        started, outputs = await before_first_token(client, site, body)
        assert started == 0
        assert site.engine.log[-1][1].startswith(RUN_ID)  # the sweep went on afterwards
        # There is a seat for it at once. In its first pause each run that is under way may have one
        # output, and a second one after it.
        assert outputs <= 2 * 2
        # With as many runs as there are seats and more, it waits behind them.
        monkeypatch.setattr(sweep_pace.SweepPace, "_is_free", lambda *_: True)
        monkeypatch.setattr("midstream.lab.server.served_sweep.runs_at_once", lambda *_: 64)
        started, outputs = await before_first_token(client, site, body)
        assert started > 0
        assert outputs > 40


async def test_runs_take_a_part_of_the_seats_and_none_while_requests_take_all_or_wait():
    async with serving() as (site, client):
        engine = site.engine
        engine.limit_seats(8)
        site.server.sweeps.wait_seconds = FOREVER
        seen = watched(engine)
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert seen.most == 2
        # While as many requests run as there are seats, or one waits for capacity, none starts.
        for states, waiting in (({f"cmpl-{n}": True for n in range(8)}, 0), ({}, 1)):
            engine.states.update(states)
            engine.waiting, before = waiting, len(engine.calls)
            answer = asyncio.ensure_future(client.post(PATH, json=BODY))
            await asyncio.sleep(0.1)
            assert len(engine.calls) == before
            engine.states.clear()
            engine.waiting = 0
            assert (await answer).status_code == 200


async def test_a_scheduler_with_priorities_gets_more_runs_behind_all_others():
    async with serving() as (site, client):
        engine = site.engine
        engine.limit_seats(8)
        engine.vllm_config.scheduler_config.policy = "priority"
        site.server.sweeps.wait_seconds = FOREVER
        engine.states["cmpl-1"] = False
        seen = watched(engine)
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert seen.most == 7  # and the ordinary request
        assert engine.vllm_args["priority"] == sweep_pace.PRIORITY > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", ["sweep", "fit"])
async def test_traffic_that_never_ends_leaves_one_run_at_a_time_to_sweeps_and_fits(kind, policy):
    async with serving() as (site, client):
        engine = site.engine
        engine.traffic = lambda: BUSY
        engine.vllm_config.scheduler_config.policy = policy
        site.server.sweeps.wait_seconds = 0.01
        seen = watched(engine)
        if kind == "sweep":
            answer = await within(30, client.post(PATH, json={**BODY, "layers": [1]}))
        else:
            engine.script = test_fit.script
            answer = await within(30, client.post(test_fit.PATH, json=test_fit.BODY))
        assert answer.status_code == 200
        assert seen.most == 1
        # As an ordinary request: behind all others it would never be computed.
        assert seen.priorities == {0}


async def test_a_run_waits_its_time_for_ordinary_requests_before_it_takes_a_seat():
    pace = sweep_pace.SweepPace(4, FOREVER)
    taken = []

    async def run():
        async with pace.turn(lambda: BUSY, False):
            taken.append(True)

    waiting = asyncio.ensure_future(run())
    await asyncio.sleep(0.1)
    assert not taken
    await end_tasks((waiting,))
    pace.wait_seconds = 0.01
    await run()
    assert taken


@pytest.mark.parametrize(
    ("seats", "tokens", "length", "by_priority", "most"),
    [
        (256, 8192, 10, False, 64),
        (256, 8192, 1000, False, 4),
        (256, 2048, 5000, False, 1),
        (1, 8192, 10, False, 1),
        (256, 8192, 5000, True, 256),
    ],
)
async def test_the_runs_of_a_sweep_take_at_most_half_the_tokens_of_a_step(
    seats, tokens, length, by_priority, most
):
    assert sweep_pace.runs_at_once(seats, tokens, length, by_priority) == most
