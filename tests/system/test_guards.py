"""Guards of a server of two API processes: scores and stops are those of the reference, and changes
hold at once, under load and after a kill.
"""

import json
import os
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support import serving
from support.api_servers import ASKED, Both, V, command
from support.nightly import rounds
from support.oracle import Oracle
from support.serving import NAME, Running, settings
from support.tokenizers import byte_level
from transformers import AutoTokenizer

from midstream import Client, Probe, Steer
from midstream.client import ServerError
from midstream.plan import Classes, Switch
from midstream.steering.guard_definition import share_of

GUARDS = "/v1/midstream/guards"
LAYER, PROMPT, COUNT = 1, "Tell me", 24
PROBE = Probe(V, layer=LAYER, phase="generated")
# Of letters alone: parts of characters would have no text.
LETTERS = byte_level().convert_tokens_to_ids(list(string.ascii_letters))
SAMPLED = {**ASKED, "max_tokens": COUNT, "allowed_token_ids": LETTERS}
ASK = {**SAMPLED, "prompt": PROMPT, "return_token_ids": True}
MESSAGE = " [stopped]"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guards") / "state"


def start(model: Path, state: Path) -> list[str]:
    # The last option of a name counts.
    options = settings(http={"log": "json", "shared_folder": str(state)}, gate_states=4)
    return [*command(model), options]


@pytest.fixture(scope="module")
def server(
    talking_llama: Path, state: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with serving.running(start(talking_llama, state), folder) as found:
        yield found


@pytest.fixture
def both(server: Running) -> Iterator[Both]:
    with ExitStack() as stack:
        found = Both(server, stack)
        yield found
        if server.process.poll() is None:
            guards = found.clients[0].call("GET", GUARDS)["guards"]
            # A first stage is needed as long as there is a second one.
            for guard in sorted(guards, key=lambda one: "when" not in one):
                found.clients[0].call("DELETE", f"{GUARDS}/{guard['name']}")


class Reference:
    """The unguarded answer, and the scores of its tokens by the reference, by position."""

    def __init__(self, both: Both, oracle: Oracle, model: Path) -> None:
        self.answer = both.clients[0].call("POST", "/v1/completions", ASK)
        (choice,) = self.answer["choices"]
        self.text, self.tokens = choice["text"], choice["token_ids"]
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.prompt = self.tokenizer(PROMPT)["input_ids"]
        _, values = oracle.run([*self.prompt, *self.tokens])
        rows = values["resid_post", LAYER].double().numpy()
        self.scores = rows @ V.double().numpy()
        self.first = len(self.prompt)
        # The last generated token is computed by a second stage only.
        generated = self.scores[self.first : -1]
        self.position = self.first + int(generated.argmax())
        self.highest = float(generated.max())
        others = np.delete(generated, generated.argmax())
        self.threshold = (self.highest + float(others.max())) / 2

    def text_to(self, position: int) -> str:
        """The text up to the token at a position."""
        found: str = self.tokenizer.decode(self.tokens[: position + 1 - self.first])
        return found


@pytest.fixture(scope="module")
def expected(server: Running, talking_oracle: Oracle, talking_llama: Path) -> Reference:
    with ExitStack() as stack:
        return Reference(Both(server, stack), talking_oracle, talking_llama)


def put(client: Client, name: str, **fields: Any) -> dict[str, Any]:
    form = {"probe": PROBE.to_dict(), "message": MESSAGE, **fields}
    found: dict[str, Any] = client.call("PUT", f"{GUARDS}/{name}", form)
    return found


def events_of(server: Running, event: str = "guard.action") -> list[dict[str, Any]]:
    found = []
    for line in server.log.splitlines():
        start = line.find("{")
        if start < 0 or f'"event": "{event}"' not in line:
            continue
        found.append(json.loads(line[start:]))
    return found


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(client: Client, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.call("POST", "/v1/completions", {**ASK, **body})
    return found


def test_a_shadow_scores_as_the_reference_and_changes_nothing(both, server, expected):
    put(both.clients[0], "shadow", above=expected.threshold)
    for client in both.clients.values():
        answer = ask(client)
        assert answer["choices"] == expected.answer["choices"]
        assert "midstream" not in answer
        event = events_of(server)[-1]
        assert (event["guard"], event["action"]) == ("shadow", "shadow")
        assert event["position"] == expected.position
        assert event["score"] == pytest.approx(expected.highest, rel=TOLERANCE)
        assert event["request_id"].startswith(answer["id"])
        assert PROMPT not in json.dumps(event)


def test_a_stop_set_in_one_process_stops_in_the_other_where_the_reference_says(both, expected):
    here, there = both.clients[0], both.clients[1]
    put(here, "stop", above=expected.threshold, action="stop")
    text = expected.text_to(expected.position) + MESSAGE
    (choice,) = ask(there)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "content_filter")
    assert choice["stop_reason"] is None
    *_, last = there.stream(PROMPT, **SAMPLED)
    assert (last.text, last.outputs[0].finish_reason) == (text, "content_filter")
    answer = there.chat([{"role": "user", "content": "x"}], model=NAME, max_tokens=2)
    assert answer.outputs[0].finish_reason in ("length", "content_filter")
    # A chat that stops in its prompt has the message alone.
    prompt = Probe(V, layer=LAYER, phase="prompt").to_dict()
    put(there, "stop", probe=prompt, above=-1e6, action="stop", visible=True)
    messages = [{"role": "user", "content": "x"}]
    for asked in (here, there):
        answer = asked.chat(messages, model=NAME, max_tokens=4, temperature=0)
        assert (answer.text, answer.outputs[0].finish_reason) == (MESSAGE, "content_filter")
        assert answer.raw["choices"][0]["stop_reason"] == "guard:stop"
        *_, last = asked.stream(messages=messages, model=NAME, max_tokens=4, temperature=0)
        assert (last.text, last.outputs[0].finish_reason) == (MESSAGE, "content_filter")


def test_several_completions_and_responses_are_stopped_and_streams_of_several_are_rejected(both):
    client = both.clients[0]
    put(client, "stop", above=-1e6, action="stop")
    several = {"n": 2, "temperature": 1.0}
    for choice in ask(client, **several)["choices"]:
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "content_filter")
        assert choice["text"].endswith(MESSAGE)
    body = {"model": NAME, "input": "x", "max_output_tokens": 8, "temperature": 0}
    prompt = Probe(V, layer=LAYER, phase="prompt").to_dict()
    with pytest.raises(ServerError, match="n: unsupported while a guard of this") as caught:
        list(client.stream(PROMPT, **{**SAMPLED, **several}))
    assert caught.value.status == 400
    beams = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "use_beam_search": True, "n": 2}
    with pytest.raises(ServerError, match="a guard of this server stops or switches") as caught:
        client.call("POST", "/v1/completions", beams)
    assert caught.value.status == 400
    put(client, "stop", above=-1e6)
    assert len(client.call("POST", "/v1/completions", beams)["choices"]) == 2
    put(client, "stop", probe=prompt, above=-1e6, action="stop")
    answer = client.call("POST", "/v1/responses", body)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == MESSAGE
    with client._http.stream("POST", "/v1/responses", json={**body, "stream": True}) as events:
        assert MESSAGE in "".join(events.iter_text())


def test_a_request_with_a_plan_has_its_own_results_and_the_flags_that_it_asks_for(both, expected):
    client = both.clients[1]
    put(client, "flag", above=expected.threshold, action="flag", visible=True)
    put(client, "hidden", above=expected.threshold, action="flag")
    own = {"probes": {**Probe(V, layer=LAYER, name="mine").to_dict()}, "guards": True}
    answer = ask(client, midstream=own)["midstream"]
    assert list(answer["probes"]) == ["mine"]
    assert "guard" not in json.dumps(answer["receipt"])
    (flag,) = answer["guards"]
    assert (flag["guard"], flag["version"], flag["action"]) == ("flag", 1, "flag")
    assert flag["position"] == expected.position
    assert ask(client, midstream={"guards": True})["midstream"] == {"guards": [flag]}


def test_a_guard_reads_the_class_that_it_names(both, server, expected):
    client = both.clients[0]
    classes = Classes(torch.stack([-V, V]), names=["other", "this"])
    form = Probe(layer=LAYER, phase="generated", classes=classes).to_dict()
    put(client, "class", probe=form, above=expected.threshold, output="this", action="stop")
    (choice,) = ask(client)["choices"]
    assert choice["text"] == expected.text_to(expected.position) + MESSAGE
    event = events_of(server)[-1]
    assert (event["guard"], event["position"]) == ("class", expected.position)
    assert event["score"] == pytest.approx(expected.highest, rel=TOLERANCE)


def test_a_guard_switches_to_its_edits_as_a_requests_own_probe_does(both, expected):
    client = both.clients[0]
    edit = Steer(V, layer=0, scale=4.0)
    own = PROBE.replace(act=Switch([edit], above=expected.threshold), name="own")
    wanted = ask(client, midstream={"probes": own.to_dict()})["choices"][0]["text"]
    put(client, "switch", above=expected.threshold, action="switch", edits=[edit.to_dict()])
    found = ask(client)["choices"][0]["text"]
    assert found == wanted != expected.text


def test_a_second_stage_reads_what_the_reference_reads_once_the_first_one_fires(
    both, server, expected
):
    client = both.clients[1]
    put(client, "cheap", above=expected.threshold)
    dear = {"when": {"guard": "cheap"}, "above": -1e6, "action": "stop", "pool": "max"}
    put(client, "dear", **dear)
    (choice,) = ask(client)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (MESSAGE, "content_filter")
    put(client, "dear", **{**dear, "above": float(expected.scores[expected.first :].max()) - 0.01})
    # Captures of every request have the answer once, and not what the server read again.
    client.call("PUT", "/v1/midstream/captures/watch", {"capture": {"layers": [LAYER]}})
    ask(client)
    (watch,) = client.call("GET", "/v1/midstream/captures")["server_wide"]
    client.call("DELETE", "/v1/midstream/captures/watch")
    assert watch["kept"]["completions"] == 1
    event = [one for one in events_of(server) if one["guard"] == "dear"][-1]
    assert event["score"] == pytest.approx(expected.scores[expected.first :].max(), rel=TOLERANCE)
    put(client, "cheap", above=expected.highest + 1)
    assert ask(client)["choices"] == expected.answer["choices"]


def test_a_sampled_share_is_the_one_that_the_ids_determine(both, server, expected):
    client = both.clients[0]
    put(client, "sampled", above=expected.threshold, scope={"share": 0.5, "models": [NAME]})
    ids = [ask(client, request_id=f"sampled-{nth}")["id"] for nth in range(8)]
    seen = {one["request_id"] for one in events_of(server) if one["guard"] == "sampled"}
    for name in ids:
        (found,) = {f"{name}-0"}
        assert (found in seen) == (share_of("sampled", found) < 0.5), name


def test_swaps_under_load_drop_no_request_and_each_answer_is_of_one_version(both, server, expected):
    """The message of an answer is that of the version in its event, from first token to last."""
    changes, clients = rounds(suite=16, nightly=1000), rounds(suite=4, nightly=64)
    made = {1: put(both.clients[0], "live", above=expected.threshold, action="stop", message=" 1")}
    done = threading.Event()
    answers: dict[str, tuple[str, bool]] = {}

    def load(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            client = Client(http=http)
            for nth in range(10**6):
                if done.is_set():
                    return
                if nth % 2:
                    found = ask(client)
                    answers[found["id"]] = (found["choices"][0]["text"], False)
                else:
                    *_, last = client.stream(PROMPT, **SAMPLED)
                    answers[last.request_id] = (last.text, True)

    with ThreadPoolExecutor(clients) as threads:
        loads = [threads.submit(load, number) for number in range(clients)]
        try:
            for version in range(2, 2 + changes):
                client = both.clients[version % 2]
                if version % 3:
                    message = f" {version}"
                    form = {"above": expected.threshold, "action": "stop", "message": message}
                    made[version] = put(client, "live", **form)
                else:
                    path = f"{GUARDS}/live/rollback"
                    made[version] = client.call("POST", path, {})
                assert made[version]["version"] == version
                # It holds in the other process before the answer.
                other = both.clients[1 - version % 2].call("GET", f"{GUARDS}/live")
                assert other["version"] == version
                # On a slow machine all changes would come between two answers.
                count = len(answers)
                until(lambda count=count: len(answers) > count)
        finally:
            done.set()
        for each in loads:
            each.result(120)
    start = expected.text_to(expected.position)
    events = {one["request_id"]: one for one in events_of(server) if one["guard"] == "live"}
    assert len(answers) >= changes
    versions = set()
    for name, (text, _) in answers.items():
        version = events[f"{name}-0"]["version"]
        assert text == start + made[version].get("message", ""), (name, version)
        versions.add(version)
    assert len(versions) > 1
    history = both.clients[0].call("GET", f"{GUARDS}/live/history")["versions"]
    assert [one["version"] for one in history] == list(range(1, 2 + changes))[-32:]
    logged = [one for one in events_of(server, "guard.changed") if one["name"] == "live"]
    assert [one["version"] for one in logged][-len(history) :] == [
        one["version"] for one in history
    ]
    status = server.wait_until_idle()
    assert status["requests"] == 0


def changed_until_killed(server: Running, killed: int) -> dict[str, int]:
    """Change guards until the server ends by the kill of one of its processes; return the last
    acknowledged version of each.
    """
    last: dict[str, int] = {}
    total = []

    def change(name: str) -> None:
        with (
            suppress(httpx.HTTPError, ServerError, ValueError),
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            for number in range(10**6):
                made = put(Client(http=http), name, above=float(number), message=f"{number}")
                last[name] = made["version"]
                total.append(name)

    threads = [threading.Thread(target=change, args=(f"kept-{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(total) >= 20)
    os.kill(killed, signal.SIGKILL)
    assert server.process.wait(60) != 0
    for thread in threads:
        thread.join(60)
    assert len(last) == len(threads)
    return last


# The last test of this file: it ends the server.
def test_acknowledged_guards_outlive_an_api_process_and_an_engine_that_are_killed_in_a_change(
    server, state, talking_llama, tmp_path, expected
):
    def check(client: Client, last: dict[str, int], before: dict[str, int]) -> None:
        for name, version in last.items():
            kept = client.call("GET", f"{GUARDS}/{name}")
            # One more may have been made that nobody was told of.
            assert kept["version"] in (version, version + 1)
            assert kept["message"] == str(kept["version"] - before.get(name, 0) - 1)

    names = {one.pid: one.name() for one in server.tree}
    [killed] = [pid for pid, name in names.items() if name.endswith("APIServer_1")]
    last = changed_until_killed(server, killed)
    command = start(talking_llama, state)
    with serving.running(command, tmp_path) as again, Client(again.url) as client:
        check(client, last, {})
        before = {name: client.call("GET", f"{GUARDS}/{name}")["version"] for name in last}
        last = changed_until_killed(again, again.engine)
    with serving.running(command, tmp_path) as again, Client(again.url) as client:
        check(client, last, before)
        # They hold for requests, too.
        for name in last:
            put(client, name, above=expected.threshold, action="stop", message=name)
        (choice,) = ask(client)["choices"]
        assert choice["finish_reason"] == "content_filter"
