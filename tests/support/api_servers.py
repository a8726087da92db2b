"""Several API server processes of one server, asked one by one and compared with the reference."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from midstream import Capture, Client, Steer
from support import serving, tiny
from support.oracle import HookEdit, Oracle, relative_error
from support.serving import NAME, Running

SITES = ("resid_pre", "resid_mid", "resid_post")
V = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(4)) * 3
ASKED: dict[str, Any] = {"model": NAME, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
EVERYTHING = Capture("all", sites=SITES)
TOLERANCE = 1e-4
# As long as makes a worker lease the rows rather than send them.
LONG_PROMPT = 470
COUNT = "--api-server-count=2"


def command(model: Path, *options: str) -> list[str]:
    setting = serving.settings(http={"log": "json"}, gate_states=4)
    return serving.command(model, f"--sites={','.join(SITES)}", COUNT, setting, *options)


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


class Judge:
    """The reference, and the tokens of a prompt."""

    def __init__(self, oracle: Oracle, model: Path) -> None:
        self.oracle = oracle
        self.run = oracle.run
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(self, prompt: str) -> list[int]:
        found: list[int] = self._tokenizer(prompt)["input_ids"]
        return found


def check(output: Any, prompt: str, judge: Judge, edits: list[HookEdit]) -> None:
    """All rows of an answer are those of its own prompt, with some edits."""
    [one] = output.outputs
    rows = one.activations
    tokens = rows.token_ids_of("resid_post", 0).tolist()
    asked = judge.encode(prompt)
    assert tokens[: len(asked)] == asked
    assert len(tokens) == len(asked) + ASKED["max_tokens"] - 1
    _, seen = judge.run(tokens, edits)
    assert set(rows) == set(seen)
    for tap in seen:
        assert relative_error(rows[tap], seen[tap]) < TOLERANCE, (prompt[:20], tap)
    assert one.receipt.status == "ok"


def steered(vector: torch.Tensor) -> list[HookEdit]:
    return [HookEdit("resid_post", 1, vector, 1.0, lambda _: True)]


def set_and_ask(both: Both, judge: Judge) -> None:
    """What is set in one process holds in the other before the call returns."""
    try:
        for nth in range(4):
            here, there = both.clients[nth % 2], both.clients[1 - nth % 2]
            vector = V * (1 + nth)
            here.vectors.register("happy", {1: vector})
            prompt = f"named {nth}"
            asked = {**ASKED, "capture": EVERYTHING}
            found = there.complete(prompt, **asked, steer=Steer("happy"))
            check(found, prompt, judge, steered(vector))
            state = here.steering.set(base="happy")
            check(there.complete(prompt, **asked), prompt, judge, steered(vector))
            assert there.steering.show() == here.steering.show()
            assert there.steering.show()["digest"] == state["digest"]
            there.steering.clear()
            check(here.complete(prompt, **asked), prompt, judge, [])
        changes = {client.status()["shared_changes"] for client in both.clients.values()}
        assert len(changes) == 1
    finally:
        both.clients[0].steering.clear()


def load(both: Both, judge: Judge, rounds: int) -> None:
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
                check(answer, prompt, judge, steered(vector))


def totals(http: httpx.Client) -> dict[str, float]:
    """Sums of midstream's metrics over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name in (family.name, f"{family.name}_total"):
                found[family.name] = found.get(family.name, 0.0) + sample.value
    return found


def folder_of(server: Running) -> Path:
    """Return the private folder of a server."""
    sockets = [str(one.laddr) for each in server.tree[1:] for one in each.net_connections("unix")]
    [found] = {Path(path).parent for path in sockets if path.endswith(("/api-0", "/api-1"))}
    return found
