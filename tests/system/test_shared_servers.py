"""Two servers share vectors and steering by a folder; one is killed under load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from support import serving, tiny
from support.serving import NAME, Running

from midstream import Client

pytestmark = pytest.mark.nightly
V = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(4)) * 3
BODY = {"model": NAME, "prompt": "How are you?", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def command(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shared") / "state"
    setting = serving.settings(http={"shared_folder": str(folder), "log": "json"})
    return serving.command(talking_llama, setting)


@pytest.fixture(scope="module")
def servers(
    command: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Running]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:

        def start(name: str) -> Running:
            return stack.enter_context(serving.running(command, tmp_path_factory.mktemp(name)))

        yield tuple(threads.map(start, ["one", "other"]))  # type: ignore[misc]


class Load:
    """Threads that ask a server again and again.

    Attributes:
        answers: (time at which it was sent, digest of the steering, text) of each answer.
        failures: what failed.
    """

    def __init__(self, server: Running, threads: int = 3) -> None:
        self.answers: list[tuple[float, str, str]] = []
        self.failures: list[str] = []
        self._url = server.url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for one in self._threads:
            one.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._is_over.is_set():
                sent = time.monotonic()
                try:
                    answer = http.post("/v1/completions", json=BODY)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    return
                if answer.status_code != 200:
                    self.failures.append(answer.text)
                    continue
                header = answer.headers.get("x-midstream-steering", "")
                self.answers.append((sent, header, answer.json()["choices"][0]["text"]))

    def end(self) -> None:
        self._is_over.set()
        for one in self._threads:
            one.join(90)


def digest_of(state: dict[str, Any]) -> str:
    return str(state["digest"])[:16]


def test_what_is_set_on_one_holds_on_the_other_and_a_killed_one_changes_nothing(
    servers: tuple[Running, Running], command: list[str], tmp_path: Path
) -> None:
    one, other = servers
    with Client(one.url) as first, Client(other.url) as second:
        plain = second.complete("How are you?", model=NAME, max_tokens=8, temperature=0).text
        loads = [Load(one), Load(other)]
        try:
            for nth in range(6):
                # Changed here, seen by requests that are sent there after the answer.
                here, there = (first, loads[1]) if nth % 2 == 0 else (second, loads[0])
                here.vectors.register("happy", {1: V * (nth + 1)})
                state = here.steering.set(base="happy")
                since = time.monotonic()
                while sum(sent > since for sent, *_ in there.answers) < 6:
                    time.sleep(0.02)
                later = [header for sent, header, _ in list(there.answers) if sent > since]
                assert all(digest_of(state) in header for header in later), (state, later)
            assert not loads[0].failures
            # It is killed under load, and while it changes something itself.
            pids = [process.pid for process in one.tree]

            def change() -> None:
                while True:
                    try:
                        first.vectors.register("sad", {0: V})
                    except (httpx.HTTPError, ValueError):
                        return

            changing = threading.Thread(target=change)
            changing.start()
            time.sleep(0.2)
            os.kill(one.process.pid, signal.SIGKILL)
            changing.join(60)
            before = len(loads[1].answers)
            second.vectors.register("after", {1: -V})
            state = second.steering.set(base="after", prompt="happy")
            since = time.monotonic()
            while sum(sent > since for sent, *_ in loads[1].answers) < 6:
                time.sleep(0.02)
            assert len(loads[1].answers) > before
            assert not loads[1].failures
            later = [entry for entry in loads[1].answers if entry[0] > since]
            assert all(digest_of(state) in header for _, header, _ in later)
            assert all(text != plain for *_, text in later)
        finally:
            for load in loads:
                load.end()
        assert loads[0].failures  # it is gone
        end = time.monotonic() + 60
        while any(map(psutil.pid_exists, pids[1:])) and time.monotonic() < end:
            time.sleep(0.2)
        # A new one in its place has the state of the others.
        with serving.running(command, tmp_path) as third, Client(third.url) as client:
            assert client.steering.show()["digest"] == state["digest"]
            assert {each["name"] for each in client.vectors.list()} >= {"happy", "after"}
            assert client.status()["shared_changes"] == second.status()["shared_changes"]
            assert httpx.get(f"{third.url}/midstream/ready").status_code == 200
            client.steering.clear()
            assert second.steering.show()["base"] == []
        assert '"event": "ready"' in other.log
