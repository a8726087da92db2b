"""What a client is told if another API server process does not answer: each problem is its own."""

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from support.serving_fake import make, refused, scope_of

from midstream.runtime.frontend.engine_info import FrontEnds
from midstream.server import peers
from midstream.server.peers import Peers, failure_of

pytestmark = pytest.mark.anyio
CAPTURES = "/v1/midstream/captures"
ROWS = "/v1/midstream/activations/abc"
WATCH = f"{CAPTURES}/watch"
SET = {"capture": {"layers": [0]}}
# Each way in which one process asks another.
ASKS = [("GET", CAPTURES, None), ("GET", ROWS, None), ("PUT", WATCH, SET)]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def beside(answer: Answer | None) -> AsyncIterator[httpx.AsyncClient]:
    """The client of a process whose only other one answers each connection so."""
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        site = await make()
        site.server.peers = Peers(Path(folder), FrontEnds(2, 0))
        path = site.server.peers._path(1)
        if answer is None:
            server = await asyncio.start_unix_server(lambda *_: None, path)
            server.close()
            path.touch()
        else:
            server = await asyncio.start_unix_server(answer, path)
        async with site.client() as client:
            yield client
        server.close()
        site.server.peers = None
        site.server.close()


def answering(status: str, body: bytes = b"", headers: str = "") -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    return answer


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\0\0\0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(("method", "path", "body"), ASKS)
@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (None, 503, "does not answer: it has ended; try again later"),
        (silent, 504, "runs, but did not answer within 0.2 s"),
        (closing, 502, "ended the connection in the middle of its answer"),
        (garbage, 502, "ended the connection in the middle of its answer"),
    ],
)
async def test_a_process_that_ended_one_that_is_slow_and_one_that_breaks_off_are_told_apart(
    method, path, body, answer, status, problem, monkeypatch
):
    monkeypatch.setattr(peers, "_SECONDS", 0.2)
    async with beside(answer) as client:
        error = await refused(client.request(method, path, json=body), status, problem)
        assert error["param"] is None


@pytest.mark.parametrize(("method", "path", "body"), ASKS)
async def test_a_process_without_descriptors_does_not_say_that_another_one_has_ended(
    method, path, body, monkeypatch
):
    async def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with beside(silent) as client:
        monkeypatch.setattr(anyio, "connect_unix", none_left)
        await refused(client.request(method, path, json=body), 507, "Too many open files")


@pytest.mark.parametrize(
    ("method", "path", "body"), [ask for ask in ASKS if ask[1] != ROWS]
)  # a client's request for rows gets the other process's answer itself
async def test_what_another_process_rejects_is_told_with_its_own_words(method, path, body):
    problem = b'{"error": {"message": "no memory is left", "param": "capture", "code": 507}}'
    async with beside(answering("507 Insufficient Storage", problem)) as client:
        asked = client.request(method, path, json=body)
        error = await refused(asked, 507, "answered: no memory is left")
        assert error["param"] == "capture"
    async with beside(answering("503 Service Unavailable", b"not yet", "retry-after: 7\r\n")) as c:
        answer = await c.request(method, path, json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_rows_for_an_edit_that_another_process_rejects_are_not_said_to_be_gone():
    edit = {"op": "replace", "rows": {"captured": "abc", "positions": [4]}, "layer": 1}
    asked = {"prompt": "abc", "midstream": {"edits": {**edit, "positions": [1]}}}
    problem = b'{"error": {"message": "no memory is left", "code": 507}}'
    for answer, status, text in (
        (answering("507 Insufficient Storage", problem), 507, "no memory is left"),
        (answering("404 Not Found", problem), 400, "there are no rows"),
        (None, 503, "it has ended"),
    ):
        async with beside(answer) as client:
            await refused(client.post("/v1/completions", json=asked), status, text)


async def test_a_request_that_cannot_be_sent_on_is_the_clients_mistake():
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        site = await make()
        site.server.peers = Peers(Path(folder), FrontEnds(2, 0))
        server = await asyncio.start_unix_server(silent, site.server.peers._path(1))
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        raw = [(b"x-odd", b"a\nb")]
        scope = {**scope_of(), "method": "GET", "path": ROWS, "raw_path": ROWS.encode()}
        await site.app({**scope, "headers": raw}, receive, send)
        assert sent[0]["status"] == 400
        assert b"cannot be sent on" in sent[1]["body"]
        sent.clear()
        await site.app({**scope, "raw_path": b"/" + b"a" * 70_000}, receive, send)
        assert sent[0]["status"] == 400
        server.close()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ECONNREFUSED, 503),
        (errno.ENOENT, 503),
        (errno.EAGAIN, 503),
        (errno.EACCES, 500),
        (errno.EMFILE, 507),
        (errno.ENFILE, 507),
        (errno.ENOMEM, 507),
    ],
)
def test_the_systems_reason_decides_what_a_failed_connection_is(number, status):
    error = httpx.ConnectError("failed")
    error.__cause__ = ValueError()
    error.__cause__.__cause__ = OSError(number, os.strerror(number))
    found = failure_of(error, 30)
    assert found.status == status
    assert ("has ended" in found.message) == (number in (errno.ECONNREFUSED, errno.ENOENT))
