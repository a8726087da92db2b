"""Behind a proxy that pipelines the requests of several clients, each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.nightly import rounds
from support.serving import Running
from system import pipelined_load
from system.pipelined_load import Load

pytestmark = [pytest.mark.model, pytest.mark.nightly]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pipelined")
    with serving.running(pipelined_load.command(smollm2), folder) as found:
        yield found


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
