"""`midstream.AsyncClient`: the asyncio version of `Client`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from midstream.client import protocol
from midstream.client.connection import connected, named_failures
from midstream.client.guards import AsyncGuards
from midstream.client.outputs import ServedOutput
from midstream.client.protocol import Exchange, HttpRequest, HttpResponse
from midstream.plan.captured_rows import CapturedRows
from midstream.results.plan_update import PlanUpdate

T = TypeVar("T")
C = TypeVar("C", bound="AsyncClient")


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
            base_url: URL of the server, with or without `/v1`.
            api_key: API key of the server.
            admin_key: key for changes of vectors and steering.
            timeout: timeout of a request in seconds; None: no timeout.
            http: an httpx.AsyncClient to use instead of a new one, with its own base URL, without
                `/v1`, keys and timeout.

        Raises:
            ConfigError: keys are given together with `http`, or its base URL ends in `/v1`.
        """
        import httpx

        self._http = connected(httpx.AsyncClient, base_url, (api_key, admin_key), timeout, http)
        self.vectors = AsyncVectors(self._run)
        self.steering = AsyncSteering(self._run)
        self.guards = AsyncGuards(self._run)

    async def complete(self, prompt: Any, **options: Any) -> ServedOutput:
        """Complete a prompt; see `Client.complete`."""
        return await self._run(protocol.complete(protocol.COMPLETIONS, options, prompt=prompt))

    async def chat(self, messages: Any, **options: Any) -> ServedOutput:
        """Answer a conversation; see `Client.chat`."""
        return await self._run(protocol.complete(protocol.CHAT, options, messages=messages))

    async def stream(
        self, prompt: Any = None, *, messages: Any = None, **options: Any
    ) -> AsyncIterator[ServedOutput]:
        """Yield the accumulated output after each event; see `Client.stream`."""
        stream = protocol.OutputStream(options, prompt, messages)
        async with aclosing(self._events_of(stream.request)) as events:
            async for data in events:
                for exchange in stream.feed(data):
                    yield await self._run(exchange)
        stream.end()

    async def read(self, answer: Any) -> ServedOutput:
        """Convert a response of another client to a ServedOutput; see `Client.read`."""
        return await self._run(protocol.read(answer))

    async def sites(self) -> dict[str, Any]:
        """Return every site of every layer; see `Client.sites`."""
        return await self._run(protocol.call("GET", protocol.SITES))

    async def status(self) -> dict[str, Any]:
        """Return versions, settings and usage of the server; see `Client.status`."""
        return await self._run(protocol.call("GET", protocol.STATUS))

    async def parameter(self, name: str) -> Any:
        """Return a parameter of the model; see `Client.parameter`."""
        return await self._run(protocol.parameter(name))

    async def update(
        self, request_id: str, *, edits: Any = None, scale: float | None = None
    ) -> PlanUpdate:
        """Change the edits of a running request; see `Client.update`."""
        return await self._run(protocol.update(request_id, edits, scale))

    async def delete(self, captured: CapturedRows) -> None:
        """Delete rows on the server; see `Client.delete`."""
        await self._run(protocol.delete(captured))

    async def call(self, method: str, path: str, json: Any = None) -> Any:
        """Send one request; see `Client.call`."""
        return await self._run(protocol.call(method, path, json))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events_of(self, request: HttpRequest) -> AsyncGenerator[str, None]:
        from httpx_sse import EventSource

        stream = self._http.stream(request.method, request.path, json=request.json)
        with named_failures(self._http):
            async with stream as response:
                if not protocol.is_stream(response):
                    protocol.refuse(response.status_code, await response.aread())
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    async for event in events:
                        yield event.data

    async def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                asked = self._http.request(request.method, request.path, json=request.json)
                with named_failures(self._http):
                    response = await asked
                request = exchange.send(HttpResponse(response.status_code, response.content))
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncRunExchange(Protocol):
    """Runs an exchange with the server."""

    def __call__(self, exchange: Exchange[T], /) -> Awaitable[T]: ...


class AsyncVectors:
    """Named vectors of a server; see `midstream.client.client.Vectors`."""

    def __init__(self, run: AsyncRunExchange) -> None:
        self._run = run

    async def register(self, name: str, vectors: Any) -> dict[str, Any]:
        """Register vectors under a name."""
        return await self._run(protocol.register_vectors(name, vectors))

    async def list(self) -> list[dict[str, Any]]:
        """Return the registered names with their properties."""
        return await self._run(protocol.list_vectors())

    async def remove(self, name: str) -> None:
        """Remove a name."""
        await self._run(protocol.remove_vectors(name))


class AsyncSteering:
    """Server-wide steering of a server."""

    def __init__(self, run: AsyncRunExchange) -> None:
        self._run = run

    async def set(self, base: Any = None, **tiers: Any) -> dict[str, Any]:
        """Set tiers."""
        return await self._run(protocol.set_tiers(base, tiers))

    async def show(self) -> dict[str, Any]:
        """Return the active steering."""
        return await self._run(protocol.call("GET", protocol.STEERING))

    async def clear(self) -> dict[str, Any]:
        """Clear all tiers."""
        return await self._run(protocol.call("DELETE", protocol.STEERING))
