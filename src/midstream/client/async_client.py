"""`midstream.AsyncClient`: as `Client`, for an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from midstream.client import protocol
from midstream.client.outputs import Reader, ServedOutput


class AsyncClient:
    """As `midstream.Client`, whose methods have the documentation; here each is awaited."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout: float | None = 600.0,
        http: Any = None,
    ) -> None:
        """Args:
        base_url: and the others: as for `Client`; `http` is an httpx.AsyncClient.
        """
        import httpx

        protocol.check_http(http, api_key, admin_key)
        self._http = http or httpx.AsyncClient(
            base_url=base_url, headers=protocol.headers_of(api_key, admin_key), timeout=timeout
        )
        self.vectors = AsyncVectors(self)
        self.steering = AsyncSteering(self)

    async def complete(self, prompt: Any, **given: Any) -> ServedOutput:
        """Completes a prompt."""
        return await self._ask(protocol.COMPLETIONS, protocol.body_of(given, prompt=prompt))

    async def chat(self, messages: Any, **given: Any) -> ServedOutput:
        """Answers a conversation."""
        return await self._ask(protocol.CHAT, protocol.body_of(given, messages=messages))

    async def stream(
        self, prompt: Any = None, *, messages: Any = None, **given: Any
    ) -> AsyncIterator[ServedOutput]:
        """What there is so far, event by event."""
        path = protocol.COMPLETIONS if messages is None else protocol.CHAT
        body = protocol.body_of(given, prompt=prompt, messages=messages, stream=True)
        reader, stream = Reader(), protocol.Stream()
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                protocol.check(response.status_code, await response.aread())
            async for data in response.aiter_bytes():
                for value in stream.feed(data):
                    yield reader.read(value, await self._follow(reader, value))
        stream.end()
        protocol.check_told(body, reader.output)

    async def read(self, answer: Any) -> ServedOutput:
        """What this client would have returned of an answer that another one got."""
        value = protocol.plain(answer)
        reader = Reader()
        return reader.read(value, await self._follow(reader, value))

    async def sites(self) -> dict[str, Any]:
        """What can be read and edited."""
        found: dict[str, Any] = await self.call("GET", protocol.SITES)
        return found

    async def status(self) -> dict[str, Any]:
        """What the server is."""
        found: dict[str, Any] = await self.call("GET", protocol.STATUS)
        return found

    async def call(self, method: str, path: str, json: Any = None) -> Any:
        """One request of any kind."""
        response = await self._http.request(method, path, json=json)
        return protocol.check(response.status_code, response.content)

    async def close(self) -> None:
        """Ends its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask(self, path: str, body: dict[str, Any]) -> ServedOutput:
        reader = Reader()
        value = await self.call("POST", path, body)
        return protocol.check_told(body, reader.read(value, await self._follow(reader, value)))

    async def _follow(self, reader: Reader, value: dict[str, Any]) -> dict[str, bytes]:
        found = {}
        for url in reader.handles(value):
            response = await self._http.get(url)
            if response.status_code >= 400:
                protocol.check(response.status_code, response.content)
            found[url] = response.content
            await self._http.delete(url)
        return found


class AsyncVectors:
    """Named vectors of a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def register(self, name: str, vectors: Any) -> dict[str, Any]:
        """Registers vectors under a name."""
        found: dict[str, Any] = await self._client.call(
            "PUT", protocol.path_of(name), protocol.upload_of(vectors)
        )
        return found

    async def list(self) -> list[dict[str, Any]]:
        """What is registered."""
        answer = await self._client.call("GET", protocol.VECTORS)
        found: list[dict[str, Any]] = answer["vectors"]
        return found

    async def remove(self, name: str) -> None:
        """Forgets a name."""
        await self._client.call("DELETE", protocol.path_of(name))


class AsyncSteering:
    """Server-wide steering."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def set(self, **tiers: Any) -> dict[str, Any]:
        """Sets tiers."""
        found: dict[str, Any] = await self._client.call(
            "PUT", protocol.STEERING, protocol.tiers_of(tiers)
        )
        return found

    async def show(self) -> dict[str, Any]:
        """What is in force."""
        found: dict[str, Any] = await self._client.call("GET", protocol.STEERING)
        return found

    async def clear(self) -> dict[str, Any]:
        """Empties all tiers."""
        found: dict[str, Any] = await self._client.call("DELETE", protocol.STEERING)
        return found
