"""The requests that clients make, without the making: what is sent, and what is read of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from midstream.client.outputs import ServedOutput
from midstream.client.request_body import extra_body
from midstream.config.config import KEY
from midstream.config.http import ADMIN_HEADER
from midstream.errors import ConfigError, ServerError
from midstream.http.sse import DONE, Event, Events
from midstream.spec.named_vector import read_name
from midstream.validation import at

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VECTORS, STEERING = "/v1/midstream/vectors", "/v1/midstream/steering"
SITES, STATUS = "/v1/midstream/sites", "/v1/midstream/status"
PLAN = ("capture", "steer", "edits", "probes")
ASKED = (*PLAN, "activations")


def headers_of(api_key: str | None, admin_key: str | None) -> dict[str, str]:
    """Those of every request."""
    found = {}
    if api_key is not None:
        found["authorization"] = f"Bearer {api_key}"
    if admin_key is not None:
        found[ADMIN_HEADER] = admin_key
    return found


def body_of(given: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A request's body.

    Args:
        given: the arguments of the call: those of midstream's, and the server's own.
        more: fields that the call itself sets.

    Raises:
        SpecError: what is asked of midstream is malformed.
    """
    asked = {name: given[name] for name in ASKED if name in given}
    body = {name: value for name, value in given.items() if name not in ASKED}
    body |= {name: value for name, value in more.items() if value is not None}
    return {**body, **extra_body(**asked)} if asked else body


def check_told(body: Mapping[str, Any], output: ServedOutput) -> ServedOutput:
    """What came of a request, if it tells of all that was asked of midstream.

    Raises:
        ServerError: it does not: nothing on that server knows of midstream.
    """
    asked = body.get(KEY, {}).keys() & set(PLAN)
    if asked and any(one.receipt is None for one in output.outputs):
        raise ServerError(
            500,
            "the server answered as if nothing had been asked of midstream: it is not enabled "
            "there. Start it with `midstream serve`, or see that VLLM_PLUGINS, where it is set, "
            "names midstream, and that --additional-config does",
        )
    return output


def plain(answer: Any) -> dict[str, Any]:
    """The JSON of an answer that another client got."""
    found: dict[str, Any] = answer.model_dump() if hasattr(answer, "model_dump") else dict(answer)
    return found


def check_http(http: Any, *keys: str | None) -> None:
    """Whether a caller's own connections can be used as asked.

    Raises:
        ConfigError: there are keys besides, which they would not send.
    """
    if http is not None and any(key is not None for key in keys):
        raise ConfigError(
            "http: give the keys in its own headers; api_key and admin_key are not used"
        )


def path_of(name: str) -> str:
    """Where vectors are.

    Raises:
        SpecError: no vectors can be called so.
    """
    with at("name"):
        return f"{VECTORS}/{quote(read_name(name))}"


def upload_of(vectors: Any) -> Any:
    """Vectors as the server takes them.

    Args:
        vectors: as `VectorRegistry.register` takes them, but no path.
    """
    from midstream.spec import Vector

    if isinstance(vectors, Mapping) and "f32" not in vectors:
        return {_key(key): _part(value) for key, value in vectors.items()}
    return Vector.parse(vectors).emit()


def _key(key: Any) -> str:
    return f"{key[0]}.{key[1]}" if isinstance(key, tuple) else str(key)


def _part(value: Any) -> Any:
    from midstream.spec import Vector

    if isinstance(value, Mapping) and "vector" in value:
        return {**value, "vector": Vector.parse(value["vector"]).emit()}
    if isinstance(value, Mapping) and "f32" not in value:
        return {_key(key): _part(inner) for key, inner in value.items()}
    return Vector.parse(value).emit()


def check(status: int, content: bytes) -> Any:
    """The JSON of an answer; None of an empty one.

    Raises:
        ServerError: it is a refusal.
    """
    try:
        value = json.loads(content) if content else None
    except (ValueError, RecursionError):
        value = content.decode("utf-8", "replace")
    if status >= 400:
        raise ServerError.of(status, value)
    return value


class Stream:
    """An answer that comes as events."""

    def __init__(self) -> None:
        self._events = Events()
        self.is_over = False

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """What is whole now.

        Raises:
            ServerError: the server says that something went wrong, after what it said before.
        """
        for event in self._events.feed(data):
            value = self._value(event)
            if value is not None:
                yield value

    def end(self) -> None:
        """No more comes.

        Raises:
            ServerError: it was not over.
        """
        if not self.is_over:
            raise ServerError(500, "the stream ended before it was over")

    def _value(self, event: Event) -> dict[str, Any] | None:
        if event.data == DONE:
            self.is_over = True
            return None
        value = event.value
        if not isinstance(value, dict):
            return None
        error = value.get("error")
        if error is not None:
            status = error.get("code", 500) if isinstance(error, dict) else 500
            raise ServerError.of(status if isinstance(status, int) else 500, value)
        return value


def tiers_of(tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Tiers of server-wide steering as the server takes them."""
    return {tier: _tier(value) for tier, value in tiers.items()}


def _tier(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not (len(value) == 2 and isinstance(value[0], str)):
        return [_tier(each) for each in value]
    return value.to_dict() if hasattr(value, "to_dict") else value
