"""Real connections to a server of this machine: slow ones, many at once, ones that break off."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import torch
from support.listening import Listening
from support.open_files import MEMORY, SOCKET, open_files
from support.serving_fake import rows

from midstream import Capture, Steer
from midstream.client import Client, ServerError

V = [1.0, 2.0, 2.0]


@pytest.fixture
def listening() -> Iterator[Listening]:
    with Listening() as found:
        yield found


@contextmanager
def connection(address, head):
    with socket.create_connection(address) as found:
        found.sendall(head)
        yield found


def head(length, path="/v1/completions", method="POST"):
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)


def test_connections_that_send_a_byte_now_and_then_keep_nobody_waiting(listening):
    body = json.dumps({"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}).encode()
    with ExitStack() as stack, Client(listening.url, timeout=30) as client:
        client.complete("abc")  # what is done once is done
        paths = ["/v1/completions", "/v1/midstream/steering", "/v1/midstream/vectors/x"]
        slow = [
            stack.enter_context(
                connection(
                    listening.address,
                    head(len(body), paths[nth % 3], "POST" if nth % 3 == 0 else "PUT"),
                )
            )
            for nth in range(50)
        ]
        for byte in body[:4]:
            for each in slow:
                each.sendall(bytes([byte]))
            # It would wait for bodies that have not come.
            output = client.complete("abc", capture=Capture([1]))
            client.steering.set(base=Steer(V, 1))
            assert len(output.activations["resid_post", 1]) == 5
        # Whoever goes on to the end is answered, be it late.
        slow[0].sendall(body[4:])
        assert slow[0].recv(100).startswith(b"HTTP/1.1 200")
    assert listening.site.engine.running == 0


def test_a_client_that_breaks_off_in_mid_stream_ends_its_call_and_leaves_nothing(listening):
    site = listening.site
    site.engine.pause = lambda: asyncio.sleep(0.02)
    body = {"prompt": "abc", "stream": True, "midstream": {"capture": {"layers": [1]}}}
    sent = json.dumps(body).encode()
    with connection(listening.address, head(len(sent)) + sent) as client:
        until(lambda: site.engine.running == 1)
    until(lambda: site.engine.running == 0)
    before = open_files(MEMORY, SOCKET)
    for nth in range(20):
        with connection(listening.address, head(len(sent)) + sent) as client:
            until(lambda count=nth + 2: len(site.engine.calls) >= count)
            if nth % 2:
                client.recv(10)
    until(lambda: site.engine.running == 0)
    until(lambda: open_files(MEMORY, SOCKET) <= before)
    assert len(site.server.captures) == 0


def test_a_client_that_breaks_off_while_it_fetches_leaves_no_file_open(listening):
    from midstream.results.serialization import pack

    data = pack(rows((1,), 200_000), 3, torch.float32)
    held = listening.site.server.captures.store(data, "me", "r", {})
    until(lambda: True)
    before = open_files(MEMORY, SOCKET)
    for _ in range(10):
        line = f"GET /v1/midstream/activations/{held.id} HTTP/1.1"
        ask = f"{line}\r\nhost: localhost\r\n\r\n".encode()
        with connection(listening.address, ask) as client:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: open_files(MEMORY, SOCKET) <= before)


def test_names_registered_steered_by_and_removed_from_many_connections_stay_whole(listening):
    refused = []

    def work(nth):
        with Client(listening.url) as client:
            for turn in range(5):
                name = f"n{(nth + turn) % 3}"
                client.vectors.register(name, {layer: [float(nth + 1)] * 3 for layer in (1, 2)})
                try:
                    state = client.steering.set(base=name)
                except ServerError as error:
                    refused.append(error.status)
                else:
                    vectors = {edit["vector"]["f32"] for edit in state["base"]}
                    assert len(state["base"]) == 2
                    assert len(vectors) == 1
                try:
                    client.vectors.remove(name)
                except ServerError as error:
                    refused.append(error.status)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert set(refused) <= {400, 404}
    assert len(listening.site.engine.vectors) == 0


def test_a_header_that_is_none_reaches_nobody(listening):
    ask = b"GET /v1/midstream/vectors HTTP/1.1\r\nhost: localhost\r\nx: a\rb: c\r\n\r\n"
    with connection(listening.address, ask) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    with httpx.Client(base_url=listening.url) as client:
        answer = client.get("/v1/midstream/vectors/x%0d%0aset-cookie:%20a=b")
        assert answer.status_code in (400, 404)
        assert "set-cookie" not in answer.headers
        name = "a%0d%0aset-cookie:%20a=b"
        assert "set-cookie" not in client.get(f"/v1/midstream/activations/{name}").headers
