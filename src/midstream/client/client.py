"""`midstream.Client`: asks a server, and waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from midstream.client import protocol
from midstream.client.outputs import Reader, ServedOutput


class Client:
    """Asks a server that has midstream, and returns what the offline API returns.

    It works beside the `openai` client: that goes to the same server, with `extra_body`.
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
        """Args:
        base_url: the server's, without `/v1`.
        api_key: the server's key.
        admin_key: for what changes the server: vectors and steering.
        timeout: seconds that one answer may take.
        http: an httpx.Client to use instead of one of its own, with its own base URL, keys and
            timeout.

        Raises:
            ConfigError: keys besides `http`.
        """
        import httpx

        protocol.check_http(http, api_key, admin_key)
        self._http = http or httpx.Client(
            base_url=base_url, headers=protocol.headers_of(api_key, admin_key), timeout=timeout
        )
        self.vectors = Vectors(self)
        self.steering = SteeringOfServer(self)

    def complete(self, prompt: Any, **given: Any) -> ServedOutput:
        """Completes a prompt.

        Args:
            prompt: as `/v1/completions` takes it.
            **given: `capture`, `steer`, `edits`, `probes` and `activations` as `extra_body` has
                them; all else are fields of the body, as `model`, `max_tokens`, `temperature`.

        Raises:
            SpecError: what is asked for is malformed.
            ServerError: the server refused it, or does not know of midstream.
            httpx.HTTPError: the server cannot be reached, or the connection broke.
        """
        return self._ask(protocol.COMPLETIONS, protocol.body_of(given, prompt=prompt))

    def chat(self, messages: Any, **given: Any) -> ServedOutput:
        """Answers a conversation; as `complete`."""
        return self._ask(protocol.CHAT, protocol.body_of(given, messages=messages))

    def stream(
        self, prompt: Any = None, *, messages: Any = None, **given: Any
    ) -> Iterator[ServedOutput]:
        """As `complete` or `chat`, but what there is so far, event by event. The last has all."""
        path = protocol.COMPLETIONS if messages is None else protocol.CHAT
        body = protocol.body_of(given, prompt=prompt, messages=messages, stream=True)
        reader, stream = Reader(), protocol.Stream()
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                protocol.check(response.status_code, response.read())
            for data in response.iter_bytes():
                for value in stream.feed(data):
                    yield reader.read(value, self._follow(reader, value))
        stream.end()
        protocol.check_told(body, reader.output)

    def read(self, answer: Any) -> ServedOutput:
        """What this client would have returned of an answer that another one got, as `openai`'s.

        Args:
            answer: its JSON, or an object with `model_dump`. Of a stream, none of its events.
        """
        value = protocol.plain(answer)
        reader = Reader()
        return reader.read(value, self._follow(reader, value))

    def sites(self) -> dict[str, Any]:
        """What can be read and edited, and why the rest cannot."""
        found: dict[str, Any] = self.call("GET", protocol.SITES)
        return found

    def status(self) -> dict[str, Any]:
        """What the server is, and what is in use."""
        found: dict[str, Any] = self.call("GET", protocol.STATUS)
        return found

    def call(self, method: str, path: str, json: Any = None) -> Any:
        """One request of any kind; the answer's JSON.

        Raises:
            ServerError: the server refused it.
        """
        response = self._http.request(method, path, json=json)
        return protocol.check(response.status_code, response.content)

    def close(self) -> None:
        """Ends its connections."""
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

    def _ask(self, path: str, body: dict[str, Any]) -> ServedOutput:
        reader = Reader()
        value = self.call("POST", path, body)
        return protocol.check_told(body, reader.read(value, self._follow(reader, value)))

    def _follow(self, reader: Reader, value: dict[str, Any]) -> dict[str, bytes]:
        """Fetches the rows that the server holds, and has it let go of them."""
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
        """Registers vectors under a name; what `VectorRegistry.register` takes, but no path."""
        found: dict[str, Any] = self._client.call(
            "PUT", protocol.path_of(name), protocol.upload_of(vectors)
        )
        return found

    def list(self) -> list[dict[str, Any]]:
        """What is registered."""
        found: list[dict[str, Any]] = self._client.call("GET", protocol.VECTORS)["vectors"]
        return found

    def remove(self, name: str) -> None:
        """Forgets a name."""
        self._client.call("DELETE", protocol.path_of(name))


class SteeringOfServer:
    """Server-wide steering."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def set(self, **tiers: Any) -> dict[str, Any]:
        """Sets tiers: `base`, `prompt`, `generated`, each an edit, its dict, a name, or a list."""
        found: dict[str, Any] = self._client.call(
            "PUT", protocol.STEERING, protocol.tiers_of(tiers)
        )
        return found

    def show(self) -> dict[str, Any]:
        """What is in force."""
        found: dict[str, Any] = self._client.call("GET", protocol.STEERING)
        return found

    def clear(self) -> dict[str, Any]:
        """Empties all tiers."""
        found: dict[str, Any] = self._client.call("DELETE", protocol.STEERING)
        return found
