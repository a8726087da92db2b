"""Behind a proxy that pipelines the requests of several clients, each gets its own answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import serving
from support.nightly import rounds
from support.pipelined import COMPLETIONS, KEYS, MESSAGES, Asked, Connection
from support.serving import NAME, Running
from support.serving_offline import VECTOR
from system import pipelined_load
from system.pipelined_load import Load

from midstream import Steer, extra_body

pytestmark = pytest.mark.model
PLAIN = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
STEERED = {**PLAIN, **extra_body(steer=Steer(VECTOR, 15, 60.0))}
SAID = {"role": "user", "content": "The capital of France is"}
MESSAGE = {"model": NAME, "messages": [SAID], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pipelined")
    with serving.running(pipelined_load.command(smollm2), folder) as found:
        yield found


def test_a_request_behind_a_steered_one_of_its_connection_is_answered_as_alone(
    server: Running,
) -> None:
    address = httpx.URL(server.url).host, httpx.URL(server.url).port or 80

    def texts(*bodies: dict[str, Any]) -> list[str]:
        with Connection(address) as connection:
            for body in bodies:
                path = MESSAGES if "messages" in body else COMPLETIONS
                asked = Asked("", "POST", path, json.dumps(body).encode(), KEYS[0])
                connection.send(asked.encoded("name"))
            found = [connection.read() for _ in bodies]
        assert [status for status, _, _ in found] == [200] * len(bodies)
        values = [json.loads(body) for _, _, body in found]
        return [(one.get("choices") or one["content"])[0]["text"] for one in values]

    steered, plain, message = (texts(body)[0] for body in (STEERED, PLAIN, MESSAGE))
    assert steered != plain
    sequence = STEERED, PLAIN, PLAIN, MESSAGE, STEERED, MESSAGE
    assert texts(*sequence) == [steered, plain, plain, message, steered, message]


@pytest.mark.nightly
def test_clients_behind_a_proxy_that_pipelines_are_answered_as_alone(
    server: Running, record_property: Any
) -> None:
    load = Load(server.url, rounds(suite=32, nightly=96))
    load.answer_alone()
    asyncio.run(load.run(rounds(suite=8, nightly=64), 2, rounds(suite=5, nightly=60)))
    record_property("requests", load.tally.requests.total())
    assert load.tally.problems == []
    assert load.tally.requests.total() > 0
    assert load.deepest > 1
