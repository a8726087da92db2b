"""Requests on one connection have nothing of each other: each is answered as on one of its own."""

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from support.listening import Listening
from support.nightly import rounds
from support.pipelined import ADDRESSES, KEYS, KINDS, Connection, Pipelines, ask, draw

TASK = "task"  # a middleware runs what is behind it in a task of its own
SERVERS = [
    ("asyncio", "h11"),
    ("uvloop", "httptools"),
    ("uvloop", "httptools", TASK),
    pytest.param(("asyncio", "httptools"), marks=pytest.mark.nightly),
    pytest.param(("uvloop", "h11"), marks=pytest.mark.nightly),
]
SEQUENCES = rounds(suite=40, nightly=2000)  # for each kind of server
THREADS = 4
BEHIND = ["plain", "plain, streamed", "plain chat", "plain response", "plain message", "captured"]


@pytest.fixture(scope="module", params=SERVERS, ids="-".join)
def pipelines(request: pytest.FixtureRequest) -> Iterator[Pipelines]:
    loop, http, *more = request.param
    listening = Listening(loop=loop, http=http, has_key=True)
    if TASK in more:
        listening.site.app.add_middleware(BaseHTTPMiddleware, dispatch=passed_on)
    with listening:
        yield Pipelines(listening, KEYS)


async def passed_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


@pytest.fixture
def default() -> Iterator[Pipelines]:
    with Listening(has_key=True) as listening:
        yield Pipelines(listening, KEYS)


def test_a_request_behind_another_one_runs_with_its_own_plan(pipelines):
    for first in ("steered", "steered, streamed", "captured", "steered chat"):
        for second in BEHIND:
            # In one piece, all are there before the first is answered.
            kinds = first, second, "health", second, "steered", second
            assert pipelines.follow([ask(kind, "one") for kind in kinds]) == []
    assert pipelines.wrong_plans() == []


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_that_comes_later_on_the_connection_runs_with_its_own_plan(default, is_answered):
    plain = ask("plain", "two")
    expected = default.answer_alone(plain)
    default.listening.site.engine.pause = lambda: asyncio.sleep(0.005)
    with Connection(default.listening.address) as connection:
        for kind in 3 * ("steered, long", "steered, streamed", "captured chat"):
            before = ask(kind, "one")
            name, second = default.name(before), default.name(plain)
            connection.send(before.encoded(name))
            while not is_answered and name not in default.ran:
                time.sleep(0.001)
            if not is_answered:
                connection.send(plain.encoded(second))
            default.read(connection, before, name)
            if is_answered:
                connection.send(plain.encoded(second))
            assert default.read(connection, plain, second) == expected
    assert default.wrong_plans() == []


def test_rows_belong_to_the_key_of_their_own_request(pipelines):
    rng = random.Random(5)
    sequence = [ask("captured", key, rng) for key in (*KEYS, *KEYS[::-1])]
    assert pipelines.follow(sequence) == []
    owners = [pipelines.answer_alone(asked).owners for asked in sequence]
    assert owners == [(asked.owner,) for asked in sequence]


def test_rows_belong_to_the_address_of_their_own_request_where_a_proxy_tells_it():
    with Listening() as listening:
        pipelines = Pipelines(listening, ADDRESSES)
        sequence = [ask("captured", address) for address in ADDRESSES]
        assert pipelines.follow(sequence) == []
        owners = [pipelines.answer_alone(asked).owners for asked in sequence]
        assert owners == [(address,) for address in ADDRESSES]


def test_a_limit_that_one_client_has_reached_is_not_that_of_the_next_on_its_connection():
    with Listening(has_key=True, client_captures=1) as listening:
        pipelines = Pipelines(listening, KEYS)
        requests = [ask("captured", key) for key in ("one", "one", "two", "one", "two", "three")]
        with Connection(listening.address) as connection:
            connection.send(b"".join(one.encoded(pipelines.name(one)) for one in requests))
            found = [connection.read()[0] for _ in requests]
        assert found == [200, 429, 200, 429, 429, 200]


def test_random_requests_on_one_connection_are_answered_as_on_one_of_their_own(pipelines):
    def work(number: int) -> list[str]:
        rng = random.Random(number)
        return [
            problem
            for _ in range(SEQUENCES // THREADS)
            for problem in pipelines.follow(draw(pipelines.clients, rng), rng)
        ]

    with ThreadPoolExecutor(THREADS) as pool:
        problems = [problem for found in pool.map(work, range(THREADS)) for problem in found]
    assert problems == []
    assert pipelines.wrong_plans() == []


def test_each_kind_of_request_is_answered_and_runs_as_it_should(default):
    statuses = {kind: default.answer_alone(ask(kind, "one")).status for kind in KINDS}
    rejected = {kind for kind, status in statuses.items() if status != 200}
    assert rejected == {kind for kind in KINDS if kind.startswith("rejected")} | {"no rows"}
    ran = {name: default.asked[name].plans for name in default.ran}
    assert default.ran == ran
    assert len(ran) == sum(bool(one.plans) for one in default.asked.values())
