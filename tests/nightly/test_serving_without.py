"""A server with midstream beside one without: the same plain answers, and memory."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nightly.serving_plain import PLAIN, answered
from support import serving
from support.nightly import NIGHTLY
from support.serving import Running
from support.serving_load import load
from support.serving_offline import Case, ask

from midstream import Capture, Client

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    command = serving.command(smollm2, "--sites=resid_post", serving.settings(gate_states=2))
    with serving.running(command, tmp_path_factory.mktemp("with")) as found:
        yield found


@pytest.fixture(scope="module")
def without(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without midstream."""
    folder = tmp_path_factory.mktemp("without")
    with serving.running(serving.plain_command(smollm2), folder) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_who_asks_for_nothing_is_answered_as_by_a_server_without_midstream(
    server: Running, without: Running, name: str, stream: bool
) -> None:
    assert answered(server, name, stream) == answered(without, name, stream)


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes")
def test_sixty_four_clients_for_two_minutes_take_no_more_memory_than_without_midstream(
    server: Running, without: Running, record_property: Any
) -> None:
    # Memory of the staging ring is taken as rows first go round.
    rows, long = server.status()["workers"][0]["ring_rows"], 480
    with Client(server.url) as client:
        for _ in range(rows // (30 * long) + 2):
            ask(client, Case(" two" * long, {"capture": Capture("all")}), activations="none")
    report = asyncio.run(load(server.url, 64, 120, 3, server.memory))
    assert report.wrong == []
    plain = asyncio.run(load(without.url, 64, 120, 3, without.memory, asks=False))
    for name, one in (("with", report), ("without", plain)):
        record_property(f"{name}: seconds of a plain request, median", one.plain_median)
        record_property(f"{name}: completions", one.completions)
        record_property(f"{name}: growth by process", one.growth())
    *others, worker = report.growth()
    assert max(others) < 32 << 20
    assert worker < max(0, plain.growth()[-1]) + (64 << 20)
