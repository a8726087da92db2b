"""The HTTP requests with the field `midstream`, found by an id that is in `vllm_xargs`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from midstream.config.config import KEY
from midstream.server.http_request import RequestContext

_XARGS = "vllm_xargs"
_ID_BYTES = 16


def carry_id(body: dict[str, Any]) -> str:
    """Put a new unguessable id into a body, unless vLLM rejects its `vllm_xargs`; return it."""
    name = secrets.token_hex(_ID_BYTES)
    xargs = body.get(_XARGS)
    if xargs is None or isinstance(xargs, dict):
        body[_XARGS] = {**(xargs or {}), KEY: name}
    return name


class OpenRequests:
    """The contexts of the requests that are not answered yet. Call on the event loop."""

    def __init__(self) -> None:
        self._contexts: dict[str, RequestContext] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    @contextmanager
    def opened(self, name: str, context: RequestContext) -> Iterator[None]:
        """Have a request, of an id of `carry_id`, among these for the duration of the context."""
        self._contexts[name] = context
        try:
            yield
        finally:
            del self._contexts[name]

    def find(self, params: Any) -> RequestContext | None:
        """Return the context whose id an engine call's parameters carry; None: they carry none."""
        name = (getattr(params, "extra_args", None) or {}).get(KEY)
        return self._contexts.get(name) if isinstance(name, str) else None
