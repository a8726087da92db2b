"""Exchanges with a server: generators that yield requests, are sent responses, return results."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from midstream.api.arguments import check_body_names
from midstream.client.outputs import Reader, ServedOutput
from midstream.client.request_body import extra_body
from midstream.config.config import KEY
from midstream.errors import ServerError, SpecError
from midstream.http.sse import DONE
from midstream.plan.captured_rows import CapturedRows
from midstream.plan.operations import in_full
from midstream.plan.plan import emit_server_wide
from midstream.plan.probe import Probe
from midstream.plan.vectors.named_vector import read_name
from midstream.results.arrays import load_tensors
from midstream.results.plan_update import PlanUpdate
from midstream.validation import at, listed, not_a_chat, show

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VECTORS, STEERING = "/v1/midstream/vectors", "/v1/midstream/steering"
PARAMETERS, ROWS = "/v1/midstream/parameters", "/v1/midstream/activations"
SITES, STATUS = "/v1/midstream/sites", "/v1/midstream/status"
REQUESTS = "/v1/midstream/requests"
PLAN = ("capture", "steer", "edits", "probes", "controller")
FIELDS = (*PLAN, "activations")
# A value of `activations` for clients alone: the rows stay on the server.
KEEP = "keep"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request to the server; `json` is the body's value, None: no body."""

    method: str
    path: str
    json: Any = None


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response of the server."""

    status: int
    content: bytes


Exchange = Generator[HttpRequest, HttpResponse, T]


def call(method: str, path: str, json: Any = None) -> Exchange[Any]:
    """Return the JSON of the response to one request; None if it is empty."""
    response = yield HttpRequest(method, path, json)
    return check(response.status, response.content)


def complete(path: str, arguments: Mapping[str, Any], **more: Any) -> Exchange[ServedOutput]:
    """Return the output of a completion, with its rows; for the arguments see `body_of`."""
    if arguments.get("stream"):
        raise SpecError("stream", "this returns the whole answer; use the client's stream()")
    body = body_of(arguments, **more)
    value = yield from call("POST", path, body)
    output = yield from read(value, _keeps(arguments))
    return check_enabled(body, output)


def read(answer: Any, keep: bool = False) -> Exchange[ServedOutput]:
    """Return a response of any client as a ServedOutput; `keep`: its rows stay on the server."""
    return (yield from _read_value(Reader(), plain(answer), keep))


def _keeps(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("activations") == KEEP)


def _read_value(reader: Reader, value: dict[str, Any], keep: bool) -> Exchange[ServedOutput]:
    """Read a response with its cached rows, deleted on the server unless it keeps them."""
    by_url: dict[str, bytes] = {}
    for url in () if keep else reader.handles(value):
        by_url[url] = yield from _fetch(url)
        yield HttpRequest("DELETE", url)
    return reader.read(value, by_url)


def _fetch(url: str) -> Exchange[bytes]:
    response = yield HttpRequest("GET", url)
    if response.status >= 400:
        check(response.status, response.content)
    return response.content


class OutputStream:
    """A streamed completion."""

    def __init__(self, arguments: Mapping[str, Any], prompt: Any, messages: Any) -> None:
        if prompt is not None and messages is not None:
            raise SpecError("messages", "a stream has a prompt or messages; give one of them")
        path = COMPLETIONS if messages is None else CHAT
        body = body_of(arguments, prompt=prompt, messages=messages, stream=True)
        self.request = HttpRequest("POST", path, body)
        self._keeps = _keeps(arguments)
        self._stream = Stream()
        self._reader = Reader()

    def feed(self, data: str) -> Iterator[Exchange[ServedOutput]]:
        """Yield the exchange for the output so far, if an event's data adds to it."""
        value = self._stream.read(data)
        if value is not None:
            yield _read_value(self._reader, value, self._keeps)

    def end(self) -> None:
        """Check that the stream is complete, and has receipts if the request had a plan."""
        self._stream.end()
        check_enabled(self.request.json, self._reader.output)


def delete(captured: CapturedRows) -> Exchange[None]:
    yield from call("DELETE", f"{ROWS}/{captured.id}")


def update(request_id: str, edits: Any, scale: float | None) -> Exchange[PlanUpdate]:
    """Change the edits of a running request; return where the version begins in each choice."""
    body: dict[str, Any] = {}
    if edits is not None:
        is_empty = isinstance(edits, (list, tuple)) and not edits
        body["edits"] = [] if is_empty else extra_body(edits=edits)[KEY]["edits"]
    if scale is not None:
        body["scale"] = scale
    path = f"{REQUESTS}/{quote(request_id, safe='')}/update"
    choices = (yield from call("POST", path, body))["choices"]
    return PlanUpdate(
        max(choice["version"] for choice in choices),
        {choice["index"]: choice["position"] for choice in choices},
    )


def register_vectors(name: str, vectors: Any) -> Exchange[dict[str, Any]]:
    """Register vectors under a name; return its properties."""
    properties: dict[str, Any] = yield from call("PUT", path_of(name), upload_of(vectors))
    return properties


def list_vectors() -> Exchange[list[dict[str, Any]]]:
    registered: list[dict[str, Any]] = (yield from call("GET", VECTORS))["vectors"]
    return registered


def remove_vectors(name: str) -> Exchange[None]:
    yield from call("DELETE", path_of(name))


def parameter(name: str) -> Exchange[Any]:
    """Return a parameter of the model; see `Client.parameter`."""
    content = yield from _fetch(f"{PARAMETERS}/{quote(name, safe='')}")
    return load_tensors(content)[name]


def body_of(arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the JSON body of a call's arguments, with `more` that the call sets unless None."""
    fields = {name: arguments[name] for name in FIELDS if name in arguments}
    if _keeps(arguments):
        fields["activations"] = "handle"
    if fields and KEY in arguments:
        raise SpecError(KEY, f"the call has {listed(fields)} too; give them in one place")
    body = {name: value for name, value in arguments.items() if name not in FIELDS}
    check_body_names(body)
    body |= {name: value for name, value in more.items() if value is not None}
    if isinstance(body.get("messages"), str):
        raise not_a_chat(body["messages"], "complete(prompt)")
    return {**body, **extra_body(**fields)} if fields else body


def check_enabled(body: Mapping[str, Any], output: ServedOutput) -> ServedOutput:
    """Return the output, after checking that it has receipts if the request had a plan."""
    fields = body.get(KEY, {}).keys() & set(PLAN)
    if fields and any(completion.receipt is None for completion in output.outputs):
        raise ServerError(
            500,
            "the server ignored the field `midstream`: midstream is not enabled there. Start it "
            "with `midstream serve`, or check that --additional-config enables midstream and that "
            "VLLM_PLUGINS, if it is set, includes midstream",
        )
    return output


def plain(answer: Any) -> dict[str, Any]:
    fields: dict[str, Any] = answer.model_dump() if hasattr(answer, "model_dump") else dict(answer)
    return fields


def path_of(name: str) -> str:
    with at("name"):
        return f"{VECTORS}/{quote(read_name(name))}"


def upload_of(vectors: Any) -> Any:
    """Return vectors or whole edits, as for `VectorRegistry.register`, in JSON form."""
    if isinstance(vectors, (str, os.PathLike)):
        raise SpecError(
            "vectors",
            f"expected vectors, got the path {show(str(vectors))}: a client reads no files; of a "
            "safetensors file, give what safetensors.numpy.load_file(path) returns",
        )
    from midstream.plan.vectors.matrix import read_vector_or_matrix
    from midstream.steering.edit_forms import names_edits, read_named_edits
    from midstream.steering.parse import by_tap

    vectors = by_tap(vectors)
    if names_edits(vectors):
        return {"edits": [part.edit.to_dict() for part in read_named_edits(vectors)]}
    if isinstance(vectors, Mapping) and "f32" not in vectors:
        return {_key(key): _part(value) for key, value in vectors.items()}
    return read_vector_or_matrix(vectors).emit()


def _key(key: Any) -> str:
    return f"{key[0]}.{key[1]}" if isinstance(key, tuple) else str(key)


def _part(value: Any) -> Any:
    from midstream.plan.vectors.matrix import read_vector_or_matrix

    if isinstance(value, Mapping) and "vector" in value:
        return {**value, "vector": read_vector_or_matrix(value["vector"]).emit()}
    if isinstance(value, Mapping) and "f32" not in value:
        return {_key(key): _part(inner) for key, inner in value.items()}
    return read_vector_or_matrix(value).emit()


def check(status: int, content: bytes) -> Any:
    """Return the JSON of a response; None if it is empty."""
    try:
        value = json.loads(content) if content else None
    except (ValueError, RecursionError):
        value = content.decode("utf-8", "replace")
    if status >= 400:
        raise ServerError.of(status, value)
    return value


def is_stream(response: Any) -> bool:
    """Whether an HTTP response is a stream of events."""
    kind = str(response.headers.get("content-type", ""))
    return response.status_code < 400 and kind.startswith("text/event-stream")


def refuse(status: int, content: bytes) -> None:
    """Raise the error of a response that is no stream, though one was asked for."""
    value = check(status, content)
    raise ServerError(500, f"expected a stream of events, got {str(value)[:400]}")


class Stream:
    """Reader of a streamed response."""

    def __init__(self) -> None:
        self.is_done = False

    def read(self, data: str) -> dict[str, Any] | None:
        """Return the value of an event's data; None: it has none."""
        self.is_done = self.is_done or data.encode() == DONE
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        error = value.get("error")
        if error is not None:
            status = error.get("code") if isinstance(error, dict) else None
            raise ServerError.of(status if isinstance(status, int) else 500, value)
        return value

    def end(self) -> None:
        if not self.is_done:
            raise ServerError(500, "the stream ended before it was complete")


def set_tiers(base: Any, tiers: Mapping[str, Any]) -> Exchange[dict[str, Any]]:
    """Set tiers of server-wide steering; return the new state."""
    every_tier = tiers if base is None else {"base": base, **tiers}
    state: dict[str, Any] = yield from call("PUT", STEERING, tiers_of(every_tier))
    return state


def tiers_of(tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Return tiers of server-wide steering in the JSON form of the server."""
    return {tier: _tier(value) for tier, value in tiers.items()}


def _tier(value: Any) -> Any:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)
    value = value if is_pair else in_full(value)
    if isinstance(value, (list, tuple)) and not is_pair:
        return [_tier(part) for part in value]
    if isinstance(value, Probe):
        return emit_server_wide(value)
    return value.to_dict() if hasattr(value, "to_dict") else value
