"""Two API server processes of one server in front of one engine: each answers for both."""

from __future__ import annotations

import json
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
from prometheus_client.parser import text_string_to_metric_families
from support import serving, tiny
from support.left_over import nothing_left
from support.oracle import HookEdit, Oracle, relative_error
from support.serving import NAME, Running

from midstream import Capture, Client, Replace, Steer
from midstream.client import ServerError

SITES = ("resid_pre", "resid_mid", "resid_post")
V = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(4)) * 3
ASKED: dict[str, Any] = {"model": NAME, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
EVERYTHING = Capture("all", sites="all")
TOLERANCE = 1e-4
# As long as makes a worker lease the rows rather than send them.
LONG_PROMPT = 470
COUNT = "--api-server-count=2"


def command(model: Path, *options: str) -> list[str]:
    setting = serving.settings(http={"log": "json"})
    return serving.command(model, f"--sites={','.join(SITES)}", COUNT, setting, *options)


@pytest.fixture(scope="module")
def server(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving.running(command(talking_llama), tmp_path_factory.mktemp("api")) as found:
        yield found


class Both:
    """A client of each of the two processes, by connections that stay open.

    Attributes:
        clients: by the number of the process.
        http: their connections.
    """

    def __init__(self, server: Running, stack: ExitStack) -> None:
        self._server, self._stack = server, stack
        self.http: dict[int, httpx.Client] = {}
        end = time.monotonic() + 60
        while set(self.http) != {0, 1}:
            http = self.connect()
            number = process_of(http)
            self.http.setdefault(number, http)
            assert time.monotonic() < end, f"only {set(self.http)} answer"
        self.clients = {number: Client(http=http) for number, http in self.http.items()}

    def connect(self) -> httpx.Client:
        found = httpx.Client(base_url=self._server.url, timeout=120)
        return self._stack.enter_context(found)


def process_of(http: httpx.Client) -> int:
    found = http.get("/v1/midstream/status").raise_for_status().json()["process"]
    assert found["count"] == 2
    return int(found["number"])


@pytest.fixture
def both(server: Running) -> Iterator[Both]:
    with ExitStack() as stack:
        found = Both(server, stack)
        yield found
        for number, http in found.http.items():
            assert process_of(http) == number, "a connection has changed its process"


def check(output: Any, prompt: str, oracle: Oracle, edits: list[HookEdit]) -> None:
    """All rows of an answer are those of its own prompt, with some edits."""
    [one] = output.outputs
    rows = one.activations
    tokens = rows.token_ids_of("resid_post", 0).tolist()
    assert bytes(tokens[: len(prompt)]).decode() == prompt
    assert len(tokens) == len(prompt) + ASKED["max_tokens"] - 1
    _, seen = oracle.run(tokens, edits)
    assert set(rows) == set(seen)
    for tap in seen:
        assert relative_error(rows[tap], seen[tap]) < TOLERANCE, (prompt[:20], tap)
    assert one.receipt.status == "ok"


def steered(vector: torch.Tensor) -> list[HookEdit]:
    return [HookEdit("resid_post", 1, vector, 1.0, lambda _: True)]


def test_vectors_and_steering_hold_in_both_before_the_call_returns(
    both: Both, talking_oracle: Oracle
) -> None:
    try:
        for nth in range(4):
            here, there = both.clients[nth % 2], both.clients[1 - nth % 2]
            vector = V * (1 + nth)
            here.vectors.register("happy", {1: vector})
            prompt = f"named {nth}"
            asked = {**ASKED, "capture": EVERYTHING}
            found = there.complete(prompt, **asked, steer=Steer("happy"))
            check(found, prompt, talking_oracle, steered(vector))
            state = here.steering.set(base="happy")
            check(there.complete(prompt, **asked), prompt, talking_oracle, steered(vector))
            assert there.steering.show() == here.steering.show()
            assert there.steering.show()["digest"] == state["digest"]
            there.steering.clear()
            check(here.complete(prompt, **asked), prompt, talking_oracle, [])
        changes = {client.status()["shared_changes"] for client in both.clients.values()}
        assert len(changes) == 1
    finally:
        both.clients[0].steering.clear()


def load(both: Both, oracle: Oracle, rounds: int) -> None:
    """Requests of both processes at once, each with its own prompt and edits."""

    def ask(number: int, thread: int) -> list[tuple[str, torch.Tensor, Any]]:
        found = []
        with httpx.Client(base_url=both.http[0].base_url, timeout=120) as http:
            client = both.clients[number] if thread == 0 else Client(http=http)
            for nth in range(rounds):
                prompt = f"{number}.{thread}.{nth} "
                if nth % 2 == thread % 2:
                    prompt += "x" * (LONG_PROMPT + nth - len(prompt))
                # Half of the vectors are those of the other process too.
                vector = V * (1 + nth if nth % 2 else 1 + nth + 0.5 * number)
                answer = client.complete(
                    prompt, **ASKED, capture=EVERYTHING, steer=Steer(vector, layer=1),
                    activations="handle" if nth % 3 else "inline",
                )  # fmt: skip
                found.append((prompt, vector, answer))
        return found

    places = [(number, thread) for number in (0, 1) for thread in range(2)]
    with ThreadPoolExecutor(len(places)) as threads:
        for found in threads.map(lambda place: ask(*place), places):
            for prompt, vector, answer in found:
                check(answer, prompt, oracle, steered(vector))


def test_rows_of_requests_of_both_are_right_and_not_mixed(
    both: Both, server: Running, talking_oracle: Oracle
) -> None:
    before = totals(both.http[0])
    load(both, talking_oracle, 4)
    status = server.wait_until_idle()
    assert all(worker["arena"]["leases"] == 0 for worker in status["workers"])
    # Metrics are those of both processes, and count the engine once; either of them says so.
    time.sleep(1.1)  # they are read once a second at most
    found = [totals(http) for http in both.http.values()]
    assert found[0]["midstream:completions"] == found[1]["midstream:completions"]
    assert found[0]["midstream:completions"] - before.get("midstream:completions", 0) == 16
    steps = sum(worker["steps"]["steps"] for worker in server.status()["workers"])
    assert found[0]["midstream:steps"] == steps
    assert found[0]["midstream:requests_running"] == 0


def totals(http: httpx.Client) -> dict[str, float]:
    """Sums of midstream's metrics over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name in (family.name, f"{family.name}_total"):
                found[family.name] = found.get(family.name, 0.0) + sample.value
    return found


def test_each_process_has_the_cached_rows_of_the_other(both: Both, talking_oracle: Oracle) -> None:
    here, there = both.clients[0], both.clients[1]
    source = here.complete("source text", **ASKED, capture=EVERYTHING, activations="keep")
    rows = source.outputs[0].captured
    [handle] = both.http[1].get("/v1/midstream/captures").json()["captures"]
    assert handle["id"] == rows.id
    url = handle["url"]
    whole = both.http[1].get(url)
    assert whole.status_code == 200
    assert whole.content == both.http[0].get(url).content
    part = both.http[1].get(url, headers={"Range": "bytes=10-99"})
    assert (part.status_code, part.content) == (206, whole.content[10:100])
    # Patched there with what was captured here.
    patch = Replace(rows, layer=1, sites="resid_post", positions=[3])
    found = there.complete("other texts", **ASKED, capture=EVERYTHING, edits=patch)
    tokens = found.outputs[0].activations.token_ids_of("resid_post", 0).tolist()
    _, plain = talking_oracle.run(tokens)
    _, seen = talking_oracle.run(list(b"source text"))
    change = seen["resid_post", 1][3] - plain["resid_post", 1][3]
    edit = HookEdit("resid_post", 1, change, 1.0, lambda at: at == 3)
    check(found, "other texts", talking_oracle, [edit])
    there.delete(rows)
    assert [http.get(url).status_code for http in both.http.values()] == [404, 404]
    assert both.http[0].get("/v1/midstream/captures").json()["bytes"] == 0


def test_a_running_request_is_updated_from_the_other_process(both: Both) -> None:
    here, there = both.clients[0], both.clients[1]
    steer = Steer(V, layer=1, scale=0.5)
    updates: list[Any] = []
    for output in here.stream("abc", **{**ASKED, "max_tokens": 400}, steer=steer):
        if not updates:
            updates.append(there.update(output.request_id, scale=0.0))
    receipt = output.outputs[0].receipt
    assert [one.version for one in receipt.versions] == [0, updates[0].version]
    assert receipt.versions[-1].start == updates[0].positions[0]
    with pytest.raises(ServerError) as caught:
        there.update(output.request_id, scale=1.0)
    assert caught.value.status == 404


def test_server_wide_captures_are_those_of_both(both: Both, talking_oracle: Oracle) -> None:
    watch = "/v1/midstream/captures/watch"
    last = {"layers": [2], "positions": "last_prompt"}
    for here, there in ((both.http[0], both.http[1]), (both.http[1], both.http[0])):
        answer = here.put(watch, json={"capture": last})
        assert answer.status_code == 200, answer.text
        prompts = ["from here", "from there"]
        for http, prompt in zip((here, there), prompts, strict=True):
            http.post("/v1/completions", json={**ASKED, "prompt": prompt}).raise_for_status()
        end = time.monotonic() + 30
        while there.get(watch).json()["kept"]["completions"] < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        found = [there.post(f"{watch}/collect").json() for _ in range(3)]
        assert [len(one["completions"]) for one in found] == [1, 1, 0]
        assert [one["kept"] for one in found] == [1, 0, 0]
        assert found[0]["completions"][0]["prompt_tokens"] == len(prompts[1])
        assert found[1]["completions"][0]["prompt_tokens"] == len(prompts[0])
        wrong = there.put(watch, json={"capture": {"layers": [99]}})
        assert wrong.status_code == 400
        assert "capture.layers" in wrong.json()["error"]["param"]
        assert there.delete(watch).status_code == 204
        assert [http.get(watch).status_code for http in (here, there)] == [404, 404]


# The last test of this file: it ends the server.
def test_a_killed_process_ends_the_server_and_leaves_nothing(both: Both, server: Running) -> None:
    names = {one.pid: one.name() for one in server.tree}
    [killed] = [pid for pid, name in names.items() if name.endswith("APIServer_1")]
    sockets = [one.laddr for one in psutil.Process(killed).net_connections("unix")]
    [folder] = {Path(one).parent for one in sockets if str(one).endswith("/api-1")}
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

    with nothing_left() as note:
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
    assert "died with exit code -9" in server.log
    assert not folder.exists()
