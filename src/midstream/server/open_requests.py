"""The HTTP requests with the field `midstream`, found by an id that is in `vllm_xargs`."""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from midstream.config.config import KEY
from midstream.server.http_request import RequestContext

_XARGS = "vllm_xargs"
_ID_BYTES = 16

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def carry_id(body: dict[str, Any]) -> str:
    """Put a new unguessable id into a body, unless vLLM rejects its `vllm_xargs`; return it."""
    name = secrets.token_hex(_ID_BYTES)
    xargs = body.get(_XARGS)
    if xargs is None or isinstance(xargs, dict):
        body[_XARGS] = {**(xargs or {}), KEY: name}
    return name


class DictEntry(AbstractContextManager[None], Generic[K, V]):
    """A value that is in a dict for the duration of the context."""

    __slots__ = ("_key", "_value", "_values")

    def __init__(self, values: dict[K, V], key: K, value: V) -> None:
        self._values, self._key, self._value = values, key, value

    def __enter__(self) -> None:
        self._values[self._key] = self._value

    def __exit__(self, *error: object) -> None:
        del self._values[self._key]


class OpenRequests:
    """The contexts of the requests that are not answered yet. Call on the event loop."""

    def __init__(self) -> None:
        self._contexts: dict[str, RequestContext] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def opened(self, name: str, context: RequestContext) -> DictEntry[str, RequestContext]:
        """Have a request, of an id of `carry_id`, among these for the duration of the context."""
        return DictEntry(self._contexts, name, context)

    def find(self, params: Any) -> RequestContext | None:
        """Return the context whose id an engine call's parameters carry; None: they carry none."""
        name = (getattr(params, "extra_args", None) or {}).get(KEY)
        return self._contexts.get(name) if isinstance(name, str) else None
