"""The two clients behind one face, so that a test holds both to the same."""

import asyncio
from typing import Any

import httpx
from starlette.testclient import TestClient
from support.serving_fake import Site

from midstream import AsyncClient, Client

KINDS = ("sync", "async")


def streamed(content: Any) -> httpx.Response:
    """A stream of events."""
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)


class Both:
    """Either client: `call("vectors.register", …)` is its answer, of a stream a list."""

    def __init__(self, kind: str, over: Site | httpx.MockTransport) -> None:
        self._loop = asyncio.new_event_loop()
        self.client: Any
        if kind == "sync":
            if isinstance(over, Site):
                http: Any = TestClient(over.app, "http://localhost", raise_server_exceptions=False)
            else:
                http = httpx.Client(transport=over, base_url="http://localhost")
            self.client = Client(http=http)
        else:
            transport: Any = over
            if isinstance(over, Site):
                transport = httpx.ASGITransport(over.app, raise_app_exceptions=False)
            self.client = AsyncClient(
                http=httpx.AsyncClient(transport=transport, base_url="http://localhost")
            )

    def call(self, name: str, /, *args: Any, **given: Any) -> Any:
        method: Any = self.client
        for part in name.split("."):
            method = getattr(method, part)
        found = method(*args, **given)
        if asyncio.iscoroutine(found):
            return self._loop.run_until_complete(found)
        return found

    def stream(self, seen: Any, *args: Any, **given: Any) -> list[Any]:
        """What `seen` says of each output of a stream, also of one that breaks."""
        found: list[Any] = []
        events = self.client.stream(*args, **given)
        if isinstance(self.client, Client):
            for output in events:
                found.append(seen(output))
            return found

        async def read() -> None:
            async for output in events:
                found.append(seen(output))

        self._loop.run_until_complete(read())
        return found

    def close(self) -> None:
        self.call("close")
        self._loop.close()
