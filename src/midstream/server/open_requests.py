"""The HTTP requests with the field `midstream`, found by what their engine calls carry.

vLLM's handler knows a request by its body alone, and makes of it the sampling parameters of the
request's engine calls. So the body carries an id: in `vllm_xargs`, which vLLM hands on as
`extra_args`. Whichever task or thread makes the call, it has the id of its own request, and a
request without the field has none.

A context variable would not do. An ASGI server may start the next request of a connection, or read
from the connection again, in the context in which the response before it was sent: what is set
there is then seen by requests that did not set it.
"""

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
    """Return a new id, which cannot be guessed, and put it into the body of a request.

    A body whose `vllm_xargs` are no object is left as it is: vLLM rejects it.
    """
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
        """Have a request among these for the duration of the context.

        Args:
            name: its id, see `carry_id`.
        """
        self._contexts[name] = context
        try:
            yield
        finally:
            del self._contexts[name]

    def find(self, params: Any) -> RequestContext | None:
        """Return the context of the request that an engine call belongs to; None: the call carries
        no id of an open request.

        Args:
            params: the call's sampling parameters, as vLLM made them of the body.
        """
        name = (getattr(params, "extra_args", None) or {}).get(KEY)
        return self._contexts.get(name) if isinstance(name, str) else None
