"""`midstream.AsyncClient`: the asyncio version of `Client`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from midstream.client import protocol
from midstream.client.outputs import Reader, ServedOutput


class AsyncClient:
    """Asyncio client of a midstream server; see `midstream.Client`, whose methods it has as
    coroutines.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout: float | None = 600.0,
        http: Any = None,
    ) -> None:
        """Create a client; the arguments are those of `Client`.

        Args:
            base_url: URL of the server, without `/v1`.
            api_key: API key of the server.
            admin_key: key for changes of vectors and steering.
            timeout: timeout of a request in seconds; None: no timeout.
            http: an httpx.AsyncClient to use instead of a new one, with its own base URL, keys and
                timeout.

        Raises:
            ConfigError: keys are given together with `http`.
        """
        import httpx

        protocol.check_http(http, api_key, admin_key)
        self._http = http or httpx.AsyncClient(
            base_url=base_url, headers=protocol.headers_of(api_key, admin_key), timeout=timeout
        )
        self.vectors = AsyncVectors(self)
        self.steering = AsyncSteering(self)

    async def complete(self, prompt: Any, **given: Any) -> ServedOutput:
        """Complete a prompt; see `Client.complete`."""
        return await self._complete(protocol.COMPLETIONS, protocol.body_of(given, prompt=prompt))

    async def chat(self, messages: Any, **given: Any) -> ServedOutput:
        """Answer a conversation; see `Client.chat`."""
        return await self._complete(protocol.CHAT, protocol.body_of(given, messages=messages))

    async def stream(
        self, prompt: Any = None, *, messages: Any = None, **given: Any
    ) -> AsyncIterator[ServedOutput]:
        """Yield the accumulated output after each event; see `Client.stream`."""
        path = protocol.COMPLETIONS if messages is None else protocol.CHAT
        body = protocol.body_of(given, prompt=prompt, messages=messages, stream=True)
        reader, stream = Reader(), protocol.Stream()
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                protocol.check(response.status_code, await response.aread())
            async for data in response.aiter_bytes():
                for value in stream.feed(data):
                    yield reader.read(value, await self._fetch_rows(reader, value))
        stream.end()
        protocol.check_enabled(body, reader.output)

    async def read(self, answer: Any) -> ServedOutput:
        """Convert a response of another client to a ServedOutput; see `Client.read`."""
        value = protocol.plain(answer)
        reader = Reader()
        return reader.read(value, await self._fetch_rows(reader, value))

    async def sites(self) -> dict[str, Any]:
        """Return every site of every layer; see `Client.sites`."""
        found: dict[str, Any] = await self.call("GET", protocol.SITES)
        return found

    async def status(self) -> dict[str, Any]:
        """Return versions, settings and usage of the server; see `Client.status`."""
        found: dict[str, Any] = await self.call("GET", protocol.STATUS)
        return found

    async def call(self, method: str, path: str, json: Any = None) -> Any:
        """Send one request; see `Client.call`."""
        response = await self._http.request(method, path, json=json)
        return protocol.check(response.status_code, response.content)

    async def close(self) -> None:
        """Close all connections."""
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

    async def _complete(self, path: str, body: dict[str, Any]) -> ServedOutput:
        reader = Reader()
        value = await self.call("POST", path, body)
        return protocol.check_enabled(
            body, reader.read(value, await self._fetch_rows(reader, value))
        )

    async def _fetch_rows(self, reader: Reader, value: dict[str, Any]) -> dict[str, bytes]:
        found = {}
        for url in reader.handles(value):
            response = await self._http.get(url)
            if response.status_code >= 400:
                protocol.check(response.status_code, response.content)
            found[url] = response.content
            await self._http.delete(url)
        return found


class AsyncVectors:
    """Named vectors of a server; see `midstream.client.synchronous.Vectors`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def register(self, name: str, vectors: Any) -> dict[str, Any]:
        """Register vectors under a name."""
        found: dict[str, Any] = await self._client.call(
            "PUT", protocol.path_of(name), protocol.upload_of(vectors)
        )
        return found

    async def list(self) -> list[dict[str, Any]]:
        """Return the registered names with their properties."""
        answer = await self._client.call("GET", protocol.VECTORS)
        found: list[dict[str, Any]] = answer["vectors"]
        return found

    async def remove(self, name: str) -> None:
        """Remove a name."""
        await self._client.call("DELETE", protocol.path_of(name))


class AsyncSteering:
    """Server-wide steering of a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def set(self, **tiers: Any) -> dict[str, Any]:
        """Set tiers."""
        found: dict[str, Any] = await self._client.call(
            "PUT", protocol.STEERING, protocol.tiers_of(tiers)
        )
        return found

    async def show(self) -> dict[str, Any]:
        """Return the active steering."""
        found: dict[str, Any] = await self._client.call("GET", protocol.STEERING)
        return found

    async def clear(self) -> dict[str, Any]:
        """Clear all tiers."""
        found: dict[str, Any] = await self._client.call("DELETE", protocol.STEERING)
        return found
