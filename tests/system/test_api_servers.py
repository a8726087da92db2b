"""Two API server processes of one server in front of one engine: each answers for both."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import serving
from support.api_servers import (
    ASKED,
    Both,
    Judge,
    V,
    command,
    folder_of,
    load,
    process_of,
    set_and_ask,
)
from support.left_over import nothing_left
from support.oracle import Oracle
from support.serving import Running

from midstream import Steer
from midstream.client import ServerError


@pytest.fixture(scope="module")
def server(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving.running(command(talking_llama), tmp_path_factory.mktemp("api")) as found:
        yield found


@pytest.fixture
def both(server: Running) -> Iterator[Both]:
    with ExitStack() as stack:
        found = Both(server, stack)
        yield found
        for number, http in found.http.items():
            assert process_of(http) == number, "a connection has changed its process"


@pytest.fixture(scope="module")
def judge(talking_oracle: Oracle, talking_llama: Path) -> Judge:
    return Judge(talking_oracle, talking_llama)


def test_vectors_and_steering_hold_in_both_before_the_call_returns(both, judge):
    set_and_ask(both, judge)


def test_rows_of_requests_of_both_are_right_and_not_mixed(both, server, judge):
    load(both, judge, 4)
    status = server.wait_until_idle()
    assert all(worker["arena"]["leases"] == 0 for worker in status["workers"])


def test_a_running_request_is_updated_from_the_other_process(both):
    here, there = both.clients[0], both.clients[1]
    steer = Steer(V, layer=1, scale=0.5)
    updates: list[Any] = []
    for output in here.stream("abc", **{**ASKED, "max_tokens": 400}, steer=steer):
        if not updates:
            updates.append(there.update(output.request_id, scale=0.0))
    receipt = output.outputs[0].receipt
    assert [one.number for one in receipt.versions] == [0, updates[0].version]
    assert receipt.versions[-1].positions[0] == updates[0].positions[0]
    with pytest.raises(ServerError) as caught:
        there.update(output.request_id, scale=1.0)
    assert caught.value.status == 404


# The last test of this file: it ends the server.
def test_a_killed_process_ends_the_server_and_leaves_nothing(server):
    names = {one.pid: one.name() for one in server.tree}
    [killed] = [pid for pid, name in names.items() if name.endswith("APIServer_1")]
    folder = folder_of(server)
    assert {"api-0", "api-1"} <= set(os.listdir(folder))
    answers: list[Any] = []

    def ask(http: httpx.Client) -> None:
        try:
            while True:
                body = {**ASKED, "prompt": "abc", "max_tokens": 100}
                asked = {**body, "midstream": {"capture": {"layers": "all"}}}
                answers.append(http.post("/v1/completions", json=asked).json())
        except (httpx.HTTPError, json.JSONDecodeError):
            return

    with ExitStack() as stack, nothing_left() as note:
        both = Both(server, stack)
        note(server)
        threads = [threading.Thread(target=ask, args=(both.connect(),)) for _ in range(4)]
        for one in threads:
            one.start()
        while len(answers) < 8:
            time.sleep(0.02)
        os.kill(killed, signal.SIGKILL)
        assert server.process.wait(60) != 0
        for one in threads:
            one.join(60)
    assert "died with exit code" in server.log
    assert not folder.exists()
