"""Endpoint for sweeps: activation patching over a grid, below ordinary requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Message, Receive, Scope, Send

from midstream.deadlines import end_tasks, within
from midstream.errors import HttpError, MidstreamError
from midstream.http.sse import DONE, Event
from midstream.lab.server.served_sweep import ServedSweep, error_of, whole
from midstream.lab.server.sweep_body import read_sweep
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.server.http_errors import send_error
from midstream.server.routes.common import (
    ERRORS,
    ErrorBody,
    MidstreamRoute,
    ServerDep,
    adapter_of,
    client_gone,
    error_responses,
)
from midstream.server.routes.request_body import json_of
from midstream.server.server import SWEEP

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: sweeps"])

_BODY = {
    "prompt": "The capital of Japan is",
    "source": "The capital of France is",
    "metric": {"logit_diff": [" Paris", " Tokyo"]},
    "layers": "all",
    "sites": ["resid_pre"],
    "positions": "prompt",
}
_SCHEMA = {
    "title": "SweepBody",
    "description": "The prompt that is patched, what it is patched with, a metric, and the grid.",
    "type": "object",
    "required": ["prompt", "source", "metric"],
    "properties": {
        "model": {"type": "string", "description": "The model, or an adapter."},
        "prompt": {"description": "Text, token ids, or the messages of a chat."},
        "source": {
            "description": 'A prompt; 0; `{"name": …}`, a registered vector; `{"captured": id}`, '
            'cached rows; `{"rows": {"resid_pre.3": …}}`; or with `features` a number.'
        },
        "metric": {
            "description": '`{"logprob": token}`, `{"logit_diff": [a, b]}`, `"kl"`, or '
            '`{"recovered": …}` of one of these.'
        },
        "layers": {},
        "sites": {},
        "positions": {"description": "One cell for each selected token. Default: the prompt."},
        "exclude": {},
        "groups": {"description": "Instead of `positions`: positions by name.", "type": "object"},
        "heads": {},
        "sae": {"type": "string", "description": "A registered SAE, with `features`."},
        "features": {"description": "Ids of features of `sae`: one cell for each."},
        "align": {},
        "alpha": {"type": "number", "default": 1.0},
        "mask": {},
        "repeats": {"type": "integer", "default": 3},
        "stream": {"type": "boolean", "default": True},
        "add_generation_prompt": {"type": "boolean"},
        "continue_final_message": {"type": "boolean"},
        "chat_template_kwargs": {"type": "object"},
    },
    "additionalProperties": False,
}
_WHOLE = {
    "format": "midstream.sweep/1",
    "values": [[[3.1, -0.4]]],
    "dims": ["site", "layer", "position"],
    "coords": {"site": ["resid_pre"], "layer": [0], "position": [3, 4]},
    "metric": {"logit_diff": [" Paris", " Tokyo"]},
    "clean": 4.2,
    "corrupt": -3.9,
    "noise_floor": 0.0,
    "tokens": [" Japan", " is"],
    "receipts": {
        "runs": 3,
        "status": "ok",
        "expected": 2,
        "applied": 2,
        "cached": 0,
        "problems": [],
    },
    "prompt_tokens": 35,
    "cached_tokens": 0,
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `start`, `cell` for each cell, `result`; or one object.",
        "content": {
            "text/event-stream": {
                "example": 'event: cell\ndata: {"type": "cell", "index": [0, 3, 4], "value": 1.5}\n'
            },
            "application/json": {"example": _WHOLE},
        },
    },
    **error_responses(400, 401, 403, 404, 413, 415, 503),
    404: {**ERRORS[404], "description": "There is no such model or adapter."},
    409: {"model": ErrorBody, "description": "Server-wide steering was changed meanwhile."},
    500: {"model": ErrorBody, "description": "The receipt of a run has problems."},
    507: ERRORS[507],
}


@router.post(
    SWEEP,
    summary="Patch a prompt at each cell of a grid, and return a metric of each",
    description="Activation patching. Events come as cells become known: `start` has dimensions, "
    "labels and the metric of the unpatched runs, `cell` an index and a value, `result` the noise "
    "floor and the sums of all receipts; then `[DONE]`. Ordinary requests go first.",
    response_class=Response,
    responses=_RESPONSES,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _SCHEMA, "example": _BODY}},
        }
    },
)
async def sweep(request: Request, server: ServerDep) -> Response:
    body = read_sweep(await json_of(request))
    with server.sweeps.begun():  # a request beyond the limit does no work
        adapter = adapter_of(request, body.model)
        prepared = await ServedSweep.prepare(server, request.scope, body, adapter)
    return _SweepResponse(prepared, body.stream)


class _SweepResponse(Response):
    """Response that carries out a sweep. It ends if its client disconnects, or reads nothing of it
    for `stall_seconds`.
    """

    def __init__(self, run: ServedSweep, is_stream: bool) -> None:
        super().__init__()
        self._run = run
        self._is_stream = is_stream
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(client_gone(receive))
        work = asyncio.ensure_future(self._answer(scope, send))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # A disconnected client does not cancel: the server is being stopped.
            await end_tasks((work,))
            await self._refuse(send, HttpError(503, "the server shuts down; try again later"))
            raise
        finally:
            await end_tasks((gone, work))
        if work.done() and not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, send: Send) -> None:
        server = self._run.server
        try:
            with server.sweeps.begun():
                async with aclosing(self._run.events()) as events:
                    await (self._stream if self._is_stream else self._whole)(events, send)
        except asyncio.TimeoutError:
            server.record_refusal(scope, 408, None)
        except (HttpError, MidstreamError, ValueError) as error:
            refusal = error_of(error)
            if self._has_begun:
                # An answer with an error status is recorded by the middleware.
                server.record_refusal(scope, refusal.status, refusal.param)
            await self._refuse(send, refusal)
        except Exception:
            await self._refuse(send, HttpError(500, "the sweep failed; the server's log has more"))
            raise

    async def _stream(self, events: AsyncGenerator[list[Event], None], send: Send) -> None:
        async for batch in events:
            if not self._has_begun:
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-store"),
                ]
                self._has_begun = True
                await self._send(send, {"type": "http.response.start", "status": 200,
                                        "headers": headers})  # fmt: skip
            await self._send(send, _part(batch, is_last=False))
        await self._send(send, _part([Event(b"", DONE)], is_last=True))

    async def _whole(self, events: AsyncGenerator[list[Event], None], send: Send) -> None:
        async for _ in events:
            pass
        assert self._run.sweep is not None
        value = await in_thread(whole, self._run.sweep)
        content = (await in_thread(json.dumps, value, allow_nan=False)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        self._has_begun = True
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": content})

    async def _refuse(self, send: Send, refusal: HttpError) -> None:
        """End the response with an error, as a response or as an event."""
        if not self._has_begun:
            self._has_begun = True
            await send_error(refusal, send)
        elif self._is_stream:
            last = _part([Event(b"", refusal.content), Event(b"", DONE)], is_last=True)
            with suppress(asyncio.TimeoutError):
                await self._send(send, last)

    async def _send(self, send: Send, message: Message) -> None:
        """Send a message, within the time that a client may take to read the ones before.

        Raises:
            TimeoutError: it took longer.
        """
        await within(self._run.server.settings.stall_seconds, send(message))


def _part(events: list[Event], is_last: bool) -> Message:
    body = b"".join(event.encoded for event in events)
    return {"type": "http.response.body", "body": body, "more_body": not is_last}
