"""How a server ends, and how it does not start: nothing of it is left."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from support import serving
from support.left_over import nothing_left
from support.serving import NAME, Running

from midstream import Capture, Client, extra_body
from midstream.store import open_store

LONG = {"model": NAME, "prompt": "abcdefgh", "max_tokens": 400, "ignore_eos": True}


@contextmanager
def holding_a_stream(server: Running) -> Iterator[Iterator[bytes]]:
    """A request in mid-stream, with rows on the workers, and others' rows held for a client."""
    with Client(server.url) as client:
        body = {**LONG, "max_tokens": 2, **extra_body(capture=Capture([1]))}
        client.call("POST", "/v1/completions", body)
    asked = {**LONG, "stream": True, **extra_body(capture=Capture("all"))}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
        events = answer.iter_bytes()
        next(events)
        yield events


def rest_of(events: Iterator[bytes]) -> bytes:
    """What still comes. A stream that neither ends nor breaks off is an error."""
    got = b""
    try:
        for part in events:
            got += part
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        pass
    return got


def start(model: Path, folder: Path, **settings: object) -> AbstractContextManager[Running]:
    options = ["--sites=resid_post", serving.settings(**settings)] if settings else []
    return serving.running(serving.command(model, *options), folder)


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_killed_server_and_a_killed_engine_take_all_with_them(talking_llama, tmp_path, victim):
    with nothing_left() as note, start(talking_llama, tmp_path) as server:
        note(server)
        with holding_a_stream(server) as events:
            os.kill(server.engine if victim == "engine" else server.process.pid, signal.SIGKILL)
            assert b'"receipt"' not in rest_of(events), "the stream ended as if all were well"
        server.process.wait(60)


def test_a_server_that_is_told_to_end_has_written_all_and_leaves_nothing(talking_llama, tmp_path):
    store = tmp_path / "store"
    with (
        nothing_left() as note,
        start(talking_llama, tmp_path, sinks={"store": {"root": str(store)}}) as server,
    ):
        note(server)
        with Client(server.url) as client:
            for nth in range(3):
                kept = Capture([1], sink="store", tag="t", request_id=f"r{nth}")
                client.complete(**{**LONG, "max_tokens": 3}, capture=kept)
        with holding_a_stream(server) as events:
            server.process.send_signal(signal.SIGTERM)
            assert b'"receipt"' not in rest_of(events), "the stream ended as if all were well"
        assert server.stop() == 0, server.log[-3000:]
        assert "midstream closing held_captures=1" in server.log
    found = open_store(store)
    assert [one.request for one in found.requests] == ["r0", "r1", "r2"]
    assert len(found.get("r0")["resid_post", 1]) == 8 + 3 - 1


def test_a_server_that_drains_lets_those_who_asked_end_and_a_long_wait_is_503(
    talking_llama, tmp_path
):
    command = serving.command(
        talking_llama,
        "--sites=resid_post",
        serving.settings(bank_rows=1, http={"wait_seconds": 1}),
        "--shutdown-timeout=60",
    )

    def ask(url: str, scale: float) -> httpx.Response:
        width = httpx.get(f"{url}/v1/midstream/sites").json()["hidden_size"]
        steered = {"vector": [scale] * width, "layer": 1}
        asked = {"steer": steered, "capture": {"layers": [1]}, "activations": "inline"}
        body = {**LONG, "midstream": asked}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    with serving.running(command, tmp_path) as server, ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, server.url, 1.0)
        end = time.monotonic() + 60
        while server.status()["requests"] == 0:
            assert time.monotonic() < end
        os.kill(server.engine, signal.SIGSTOP)
        second = ask(server.url, 2.0)
        assert second.status_code == 503, second.text
        assert int(second.headers["retry-after"]) >= 1
        assert "http.wait_seconds" in second.json()["error"]["message"]
        assert not first.done()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        os.kill(server.engine, signal.SIGCONT)
        answer = first.result(90)
        assert answer.status_code == 200, answer.text
        assert answer.json()["midstream"]["receipt"]["status"] == "ok"
        assert server.stop() == 0, server.log[-3000:]
