"""Where the clients' server is, and what a failed connection says."""

import asyncio
import socket

import httpx
import pytest
from unit.client.both import KINDS

from midstream.client import AsyncClient, Client
from midstream.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "url", ["http://s:8/", "http://s:8/v1", "http://s:8/v1/", "http://s:8/under/v1"]
)
def test_the_url_that_other_clients_take_is_the_servers_too(kind, url, monkeypatch):
    asked = []

    def answer(request):
        asked.append(str(request.url))
        return httpx.Response(200, json={"choices": [{"index": 0, "text": "x"}]})

    cls, made = (Client, "Client") if kind == "sync" else (AsyncClient, "AsyncClient")
    original = getattr(httpx, made)
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, made, lambda **given: original(transport=transport, **given))
    client = cls(url, api_key="k")
    found = client.complete("abc")
    if kind == "async":
        found = asyncio.run(found)
    assert found.text == "x"
    root = url.rstrip("/").removesuffix("/v1")
    assert asked == [f"{root}/v1/completions"]
    with pytest.raises(ConfigError, match=r"expected a base URL without /v1, got http://s:8/v1"):
        cls(http=original(base_url="http://u:secret@s:8/v1"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("via", ["HTTP_PROXY", "ALL_PROXY", ""])
def test_a_connection_that_fails_names_the_server_and_the_proxy(kind, via, monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        if via:
            monkeypatch.setenv(via, f"http://user:secret@127.0.0.1:{port}")
        url = "http://127.0.0.2:9" if via else f"http://127.0.0.1:{port}"
        for named in (f"{url}/v1", url):
            with pytest.raises(httpx.ConnectError) as caught:
                _fail(kind, named)
            told = str(caught.value)
            assert f"({url}" in told
            assert "secret" not in told
            assert (f"through the proxy http://127.0.0.1:{port}" in told) == bool(via)
            assert (f"the environment's {via}" in told) == bool(via)
            assert ("add 127.0.0.2 to NO_PROXY" in told) == bool(via)
            assert ("Start one with `midstream serve MODEL`" in told) == (not via)
            assert caught.value.__cause__ is None  # its traceback is of one error
    monkeypatch.setenv("NO_PROXY", "127.0.0.2")
    with pytest.raises(httpx.ConnectError) as caught:
        _fail(kind, "http://127.0.0.2:9")
    assert "proxy" not in str(caught.value)


def _fail(kind, url):
    stream = url.endswith("/v1")
    if kind == "sync":
        with Client(url) as client:
            return list(client.stream("abc")) if stream else client.complete("abc")

    async def ask():
        async with AsyncClient(url) as client:
            if not stream:
                return await client.complete("abc")
            return [one async for one in client.stream("abc")]

    return asyncio.run(ask())
