"""`midstream.Client`: a blocking client of a midstream server."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from midstream.client import protocol
from midstream.client.outputs import Reader, ServedOutput


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
            base_url: URL of the server, without `/v1`.
            api_key: API key of the server.
            admin_key: key for changes of vectors and steering.
            timeout: timeout of a request in seconds; None: no timeout.
            http: an httpx.Client to use instead of a new one, with its own base URL, keys and
                timeout.

        Raises:
            ConfigError: keys are given together with `http`.
        """
        import httpx

        protocol.check_http(http, api_key, admin_key)
        self._http = http or httpx.Client(
            base_url=base_url, headers=protocol.headers_of(api_key, admin_key), timeout=timeout
        )
        self.vectors = Vectors(self)
        self.steering = SteeringOfServer(self)

    def complete(self, prompt: Any, **given: Any) -> ServedOutput:
        """Complete a prompt.

        Args:
            prompt: as for `/v1/completions`.
            **given: `capture`, `steer`, `edits`, `probes` and `activations` as for `extra_body`;
                all others are fields of the request body, such as `model`, `max_tokens`,
                `temperature`.

        Raises:
            SpecError: an argument for midstream is malformed.
            ServerError: the server rejected the request, or midstream is not enabled there.
            httpx.HTTPError: the server is unreachable, or the connection failed.
        """
        return self._complete(protocol.COMPLETIONS, protocol.body_of(given, prompt=prompt))

    def chat(self, messages: Any, **given: Any) -> ServedOutput:
        """Answer a conversation; arguments and exceptions are those of `complete`.

        Args:
            messages: as for `/v1/chat/completions`.
            **given: as for `complete`.
        """
        return self._complete(protocol.CHAT, protocol.body_of(given, messages=messages))

    def stream(
        self, prompt: Any = None, *, messages: Any = None, **given: Any
    ) -> Iterator[ServedOutput]:
        """Yield the accumulated output after each event of a stream; the last one is complete.

        Arguments and exceptions are those of `complete`, or of `chat` if `messages` is given.
        """
        path = protocol.COMPLETIONS if messages is None else protocol.CHAT
        body = protocol.body_of(given, prompt=prompt, messages=messages, stream=True)
        reader, stream = Reader(), protocol.Stream()
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                protocol.check(response.status_code, response.read())
            for data in response.iter_bytes():
                for value in stream.feed(data):
                    yield reader.read(value, self._fetch_rows(reader, value))
        stream.end()
        protocol.check_enabled(body, reader.output)

    def read(self, answer: Any) -> ServedOutput:
        """Convert a response of another client, such as `openai`'s, to a ServedOutput.

        Fetches rows that the server has cached for it.

        Args:
            answer: JSON of the response, or an object with `model_dump`; not an event of a stream.

        Raises:
            ServerError: the rows cannot be fetched.
        """
        value = protocol.plain(answer)
        reader = Reader()
        return reader.read(value, self._fetch_rows(reader, value))

    def sites(self) -> dict[str, Any]:
        """Return every site of every layer: tapped, or the reason why not."""
        found: dict[str, Any] = self.call("GET", protocol.SITES)
        return found

    def status(self) -> dict[str, Any]:
        """Return versions, settings and usage of the server."""
        found: dict[str, Any] = self.call("GET", protocol.STATUS)
        return found

    def call(self, method: str, path: str, json: Any = None) -> Any:
        """Send one request, and return the JSON of its response; None if it is empty.

        Raises:
            ServerError: the server rejected the request.
        """
        response = self._http.request(method, path, json=json)
        return protocol.check(response.status_code, response.content)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _complete(self, path: str, body: dict[str, Any]) -> ServedOutput:
        reader = Reader()
        value = self.call("POST", path, body)
        return protocol.check_enabled(body, reader.read(value, self._fetch_rows(reader, value)))

    def _fetch_rows(self, reader: Reader, value: dict[str, Any]) -> dict[str, bytes]:
        """Fetch the rows that the server has cached, and delete them there."""
        found = {}
        for url in reader.handles(value):
            response = self._http.get(url)
            if response.status_code >= 400:
                protocol.check(response.status_code, response.content)
            found[url] = response.content
            self._http.delete(url)
        return found


class Vectors:
    """Named vectors of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def register(self, name: str, vectors: Any) -> dict[str, Any]:
        """Register vectors under a name, as `VectorRegistry.register`, except from a path."""
        found: dict[str, Any] = self._client.call(
            "PUT", protocol.path_of(name), protocol.upload_of(vectors)
        )
        return found

    def list(self) -> list[dict[str, Any]]:
        """Return the registered names with their properties."""
        found: list[dict[str, Any]] = self._client.call("GET", protocol.VECTORS)["vectors"]
        return found

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._client.call("DELETE", protocol.path_of(name))


class SteeringOfServer:
    """Server-wide steering of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def set(self, **tiers: Any) -> dict[str, Any]:
        """Set the tiers `base`, `prompt` and `generated`: each an edit, its dict, a name, or a
        list.
        """
        found: dict[str, Any] = self._client.call(
            "PUT", protocol.STEERING, protocol.tiers_of(tiers)
        )
        return found

    def show(self) -> dict[str, Any]:
        """Return the active steering."""
        found: dict[str, Any] = self._client.call("GET", protocol.STEERING)
        return found

    def clear(self) -> dict[str, Any]:
        """Clear all tiers."""
        found: dict[str, Any] = self._client.call("DELETE", protocol.STEERING)
        return found
