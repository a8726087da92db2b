"""`midstream.Client`: a blocking client of a midstream server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from midstream.client import protocol
from midstream.client.connection import connected, named_failures
from midstream.client.guards import ServedGuards
from midstream.client.outputs import ServedOutput
from midstream.client.protocol import Exchange, HttpRequest, HttpResponse
from midstream.plan.captured_rows import CapturedRows
from midstream.results.plan_update import PlanUpdate

T = TypeVar("T")
C = TypeVar("C", bound="Client")


class Client:
    """Client of a midstream server; returns results in the form of the offline API.

    Works beside the `openai` client, which can send requests to the same server with `extra_body`.
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
        """Create a client.

        Args:
            base_url: URL of the server, with or without `/v1`.
            api_key: API key of the server.
            admin_key: key for changes of vectors and steering.
            timeout: timeout of a request in seconds; None: no timeout.
            http: an httpx.Client to use instead of a new one, with its own base URL, without
                `/v1`, keys and timeout.

        Raises:
            ConfigError: keys are given together with `http`, or its base URL ends in `/v1`.
        """
        import httpx

        self._http = connected(httpx.Client, base_url, (api_key, admin_key), timeout, http)
        self.vectors = Vectors(self._run)
        self.steering = SteeringOfServer(self._run)
        self.guards = ServedGuards(self._run)

    def complete(self, prompt: Any, **options: Any) -> ServedOutput:
        """Complete a prompt.

        Args:
            prompt: as for `/v1/completions`.
            **options: `capture`, `steer`, `edits`, `probes`, `controller` and `activations` as for
                `extra_body`; with `activations="keep"` the rows stay on the server, for edits of
                later requests: `output.outputs[0].captured` refers to them. All others are fields
                of the request body, such as `model`, `max_tokens`, `temperature`.

        Raises:
            SpecError: an argument for midstream is malformed.
            ServerError: the server rejected the request, or midstream is not enabled there.
            httpx.HTTPError: the server is unreachable, or the connection failed.
        """
        return self._run(protocol.complete(protocol.COMPLETIONS, options, prompt=prompt))

    def chat(self, messages: Any, **options: Any) -> ServedOutput:
        """Answer a conversation; arguments and exceptions are those of `complete`.

        Args:
            messages: as for `/v1/chat/completions`.
            **options: as for `complete`.
        """
        return self._run(protocol.complete(protocol.CHAT, options, messages=messages))

    def stream(
        self, prompt: Any = None, *, messages: Any = None, **options: Any
    ) -> Iterator[ServedOutput]:
        """Yield the accumulated output after each event of a stream; the last one is complete.

        Arguments and exceptions are those of `complete`, or of `chat` if `messages` is given.
        """
        stream = protocol.OutputStream(options, prompt, messages)
        for data in self._events_of(stream.request):
            for exchange in stream.feed(data):
                yield self._run(exchange)
        stream.end()

    def read(self, answer: Any) -> ServedOutput:
        """Convert a response of another client, such as `openai`'s, to a ServedOutput, with the
        rows that the server has cached for it.

        Args:
            answer: JSON of the response, or an object with `model_dump`; not an event of a stream.

        Raises:
            ServerError: the rows cannot be fetched.
        """
        return self._run(protocol.read(answer))

    def sites(self) -> dict[str, Any]:
        """Return every site of every layer: tapped, or the reason why not."""
        return self._run(protocol.call("GET", protocol.SITES))

    def status(self) -> dict[str, Any]:
        """Return versions, settings and usage of the server."""
        return self._run(protocol.call("GET", protocol.STATUS))

    def parameter(self, name: str) -> Any:
        """Return a parameter of the model outside its decoder layers: embeddings, norms, head.

        Args:
            name: its name in the checkpoint, for example `lm_head.weight`. The server's setting
                `http.parameters` must have it.

        Returns:
            A tensor in the model's dtype; an embedding or a head is [vocabulary, width]. Without
            torch it is a NumPy array, with bfloat16 widened to float32.

        Raises:
            ServerError: the server does not allow it, or the model has no such parameter.
        """
        return self._run(protocol.parameter(name))

    def update(
        self, request_id: str, *, edits: Any = None, scale: float | None = None
    ) -> PlanUpdate:
        """Change the edits of a running request of this client, from the first position that is not
        scheduled yet. Its receipt lists the versions and where each held.

        Args:
            request_id: id in the response of the request, such as `output.request_id` of a stream.
            edits: its own edits from now on, in any form of `complete`; `[]`: none. None: those
                given last.
            scale: factor on the strength of the edits given last: 0 turns them off, 1 restores
                them. None: 1.

        Returns:
            The number of the version, and where it begins in each choice that still runs.

        Raises:
            ServerError: 404, no such request runs; 409, several with this id do; 400, it cannot
                have these edits; 503, there is no capacity for them now.
        """
        return self._run(protocol.update(request_id, edits, scale))

    def delete(self, captured: CapturedRows) -> None:
        """Delete rows on the server, which otherwise expire.

        Raises:
            ServerError: there are no such rows.
        """
        self._run(protocol.delete(captured))

    def call(self, method: str, path: str, json: Any = None) -> Any:
        """Send one request, and return the JSON of its response; None if it is empty.

        Raises:
            ServerError: the server rejected the request.
        """
        return self._run(protocol.call(method, path, json))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events_of(self, request: HttpRequest) -> Iterator[str]:
        """Yield the data of each event of a stream."""
        from httpx_sse import EventSource

        stream = self._http.stream(request.method, request.path, json=request.json)
        with named_failures(self._http), stream as response:
            if not protocol.is_stream(response):
                protocol.refuse(response.status_code, response.read())
            for event in EventSource(response).iter_sse():
                yield event.data

    def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                with named_failures(self._http):
                    response = self._http.request(request.method, request.path, json=request.json)
                request = exchange.send(HttpResponse(response.status_code, response.content))
        except StopIteration as end:
            result: T = end.value
            return result


class RunExchange(Protocol):
    """Runs an exchange with the server."""

    def __call__(self, exchange: Exchange[T], /) -> T: ...


class Vectors:
    """Named vectors of a server."""

    def __init__(self, run: RunExchange) -> None:
        self._run = run

    def register(self, name: str, vectors: Any) -> dict[str, Any]:
        """Register vectors under a name, as `VectorRegistry.register`, except from a path."""
        return self._run(protocol.register_vectors(name, vectors))

    def list(self) -> list[dict[str, Any]]:
        """Return the registered names with their properties."""
        return self._run(protocol.list_vectors())

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._run(protocol.remove_vectors(name))


class SteeringOfServer:
    """Server-wide steering of a server."""

    def __init__(self, run: RunExchange) -> None:
        self._run = run

    def set(self, base: Any = None, **tiers: Any) -> dict[str, Any]:
        """Set the tiers `base`, `prompt` and `generated`: each an edit, its dict, a name, or a
        list; None: unchanged.
        """
        return self._run(protocol.set_tiers(base, tiers))

    def show(self) -> dict[str, Any]:
        """Return the active steering."""
        return self._run(protocol.call("GET", protocol.STEERING))

    def clear(self) -> dict[str, Any]:
        """Clear all tiers."""
        return self._run(protocol.call("DELETE", protocol.STEERING))
