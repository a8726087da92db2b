"""Insertion of results into a response, whether it is one body or a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from midstream.config.config import KEY
from midstream.deadlines import within
from midstream.errors import HttpError, MidstreamError
from midstream.http.sse import DONE, Event, Events
from midstream.server.base64_text import dump
from midstream.server.http_errors import read_error, send_error, send_json
from midstream.server.http_request import ChoiceUpdate, RequestContext
from midstream.server.results_json import plain

if TYPE_CHECKING:
    from midstream.server.server import Server


class ResponseWriter:
    """ASGI `send` that adds results to a response."""

    def __init__(
        self,
        context: RequestContext,
        server: Server,
        send: Send,
        on_error: Callable[[int, str | None], None],  # for errors that the status does not show
    ) -> None:
        self._on_error = on_error
        self._context = context
        self._server = server
        self._send = send
        self._start: Message | None = None  # delayed until the status is final
        self.is_stalled = False  # whether its client read nothing of it
        self._has_begun = False  # whether a part of the response was sent
        self._is_stream = False
        self._is_first = True  # no event except comments has been received
        self._events = Events()
        self._parts: list[bytes] = []
        self._is_done = False

    async def refuse(self, refusal: HttpError) -> bool:
        """End the response with an error, as a response or as an event; return whether it could."""
        if self._is_done or (self._has_begun and not self._is_stream):
            return False
        self._is_done = True
        if not self._has_begun:
            await send_error(refusal, self._send)
        else:
            self._on_error(refusal.status, refusal.param)
            last = Event(b"", refusal.content).encoded + Event(b"", DONE).encoded
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        return True

    async def __call__(self, message: Message) -> None:
        if self._is_done:
            return
        if message["type"] == "http.response.start":
            self._start = message
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body" and self._is_stream:
            await self._stream(message)
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole(b"".join(self._parts))
        else:
            await self._send(message)

    # -- in one body -----------------------------------------------------------------------------

    async def _whole(self, body: bytes) -> None:
        start = self._start
        assert start is not None
        self._has_begun = True
        if self._context.refusal is not None:
            await send_error(self._context.refusal, self._send)
            return
        if start["status"] == 200:
            try:
                body = await self._with_results(body)
            except (HttpError, MidstreamError) as error:
                refusal = HttpError.of(error)
                body = refusal.content
                start = {**start, "status": refusal.status}
        else:
            body = self._with_param(body)
        start = {**start, "headers": list(start["headers"])}
        MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
        if start["status"] == 200:
            self._context.undelivered.clear()

    async def _with_results(self, body: bytes) -> bytes:
        is_spliced = self._context.is_single and _is_object(body)
        value = None if is_spliced else json.loads(body)
        if not is_spliced and not isinstance(value, dict):
            # vLLM answers a request that its client aborted with `null`.
            return body
        _check_reached(self._context)
        encoded = {choice: results for choice, _, results in await self._encoded_updates()}
        if value is None:
            return _with_field(body, encoded[0]) if encoded.get(0) else body
        if encoded and "choices" not in value:
            value[KEY] = plain(_responses_field(list(encoded.values())))
        for choice in value.get("choices", ()):
            if encoded.get(choice["index"]):
                holder = value if self._context.is_single else choice
                holder[KEY] = plain(encoded[choice["index"]])
        return json.dumps(value).encode()

    def _with_param(self, body: bytes) -> bytes:
        """Add the name of the invalid field to vLLM's response to midstream's exception."""
        field = self._context.invalid_field
        value = read_error(body) if field else None
        if value is None or value["error"].get("param") is not None:
            return body
        value["error"]["param"] = field
        return json.dumps(value).encode()

    # -- as a stream -----------------------------------------------------------------------------

    async def _stream(self, message: Message) -> None:
        out = []
        for event in self._events.feed(message.get("body", b"")):
            refusal = self._context.refusal
            if refusal is None or not _is_last(event):
                if self._start and self._is_first and await self._convert_first_error(event):
                    return
                self._is_first = self._is_first and not event.data
                try:
                    out += await self._with_updates(event)
                    continue
                except (HttpError, MidstreamError) as error:
                    refusal = HttpError.of(error)
            await self._send_events(out, more=True)
            await self.refuse(refusal)
            return
        more = message.get("more_body", False)
        if not more and self._events.rest:
            out.append(Event(b"", b"", self._events.rest))
        await self._send_events(out, more)
        self._context.undelivered.clear()

    async def _send_events(self, events: list[Event], more: bool) -> None:
        """Send events, within the time that a client may take to read the ones before."""
        if more and not events:
            return
        start, self._start = self._start, None
        self._has_begun = True
        seconds = self._server.settings.stall_seconds
        body = b"".join(event.encoded for event in events)
        try:
            if start is not None:
                await self._send(start)
            message = {"type": "http.response.body", "body": body, "more_body": more}
            await within(seconds, self._send(message))
        except asyncio.TimeoutError:
            self._is_done = self.is_stalled = True
            raise

    async def _convert_first_error(self, event: Event) -> bool:
        """Answer a stream that begins with an error by its status; return whether it did."""
        if b'"error"' not in event.data:
            return False
        value = event.value
        error = value.get("error") if isinstance(value, dict) else None
        status = error.get("code") if isinstance(error, dict) else None
        if not isinstance(status, int) or not 400 <= status < 600:
            return False
        self._is_done = True
        await send_json(status, self._with_param(event.data), {}, self._send)
        return True

    async def _with_updates(self, event: Event) -> list[Event]:
        """Return an event with new results of its choices, and before `[DONE]` the remaining."""
        if event.data == DONE:
            _check_reached(self._context)
            return [*await self._remaining(), event]
        if self._context.is_single and _is_chunk(event):
            results = await self._encode(0)
            return [Event(b"", _with_field(event.data, results)) if results else event]
        value = event.value
        if not isinstance(value, dict):
            return [event]
        if value.get("type") in _FINAL_EVENTS:
            _check_reached(self._context)
            encoded = [results for _, _, results in await self._encoded_updates()]
            if encoded:
                value[KEY] = plain(_responses_field(encoded))
            return [event.with_data(value)]
        changed = False
        for choice in value.get("choices") or ():
            results = await self._encode(choice.get("index"))
            if results:
                holder = value if self._context.is_single else choice
                holder[KEY], changed = plain(results), True
        return [event.with_data(value) if changed else event]

    async def _encode(self, choice: Any) -> dict[str, Any]:
        """Return the new results of a choice, which count as sent; empty if there are none."""
        update = self._context.updates.pop(choice, None)
        if update is None:
            return {}
        return await self._server.answers.encode(self._context, choice, update)

    async def _remaining(self) -> list[Event]:
        events = []
        for choice, update, encoded in await self._encoded_updates():
            if encoded:
                value: dict[str, Any] = {"object": KEY, "choices": []}
                ending = _ending(update)
                if self._context.is_single and not ending:
                    value[KEY] = plain(encoded)
                else:
                    value["choices"] = [{"index": choice, **ending, KEY: plain(encoded)}]
                events.append(Event(b"", b"").with_data(value))
        return events

    async def _encoded_updates(self) -> list[tuple[int, ChoiceUpdate, dict[str, Any]]]:
        """Return each choice, its update and its new results, which count as sent."""
        encode, context = self._server.answers.encode, self._context
        updates = sorted(context.take_updates().items())
        return [(choice, each, await encode(context, choice, each)) for choice, each in updates]


def _check_reached(context: RequestContext) -> None:
    """Check that the plan went with an engine call: else vLLM's answer is one without it."""
    if not context.calls:
        raise HttpError(500, "vLLM made no engine call with this request's plan", KEY)


def _is_last(event: Event) -> bool:
    """Return whether an event ends a stream, or is an error that does."""
    if b'"error"' not in event.data and b'"type"' not in event.data:
        return event.data == DONE
    value = event.value
    is_final = isinstance(value, dict) and ("error" in value or value.get("type") in _FINAL_EVENTS)
    return event.data == DONE or is_final


def _ending(update: ChoiceUpdate) -> dict[str, Any]:
    """Return the fields of a choice that a probe stopped in the prompt, without an event."""
    final = update.final
    if final is None or final.receipt.generated_tokens:
        return {}
    if not any(action.kind == "stop" for action in final.receipt.actions):
        return {}
    return {"finish_reason": final.finish_reason, "stop_reason": final.stop_reason}


def _is_chunk(event: Event) -> bool:
    """Return whether an event is a chunk of one choice: in JSON strings, quotes are escaped."""
    return not event.name and _CHOICE in event.data and _is_object(event.data)


def _is_object(body: bytes) -> bool:
    """Return whether a body of vLLM is a JSON object with some field."""
    return body.startswith(b'{"') and body.endswith(b"}")


def _with_field(body: bytes, results: dict[str, Any]) -> bytes:
    """Return a JSON object with one more field, the results. What is there is not parsed."""
    return b"".join([body[:-1], _KEY, *dump(results), b"}"])


def _responses_field(encoded: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the field of a Responses API body: one result, or one per engine call in `turns`."""
    return encoded[0] if len(encoded) == 1 else {"turns": encoded}


_KEY = f',"{KEY}":'.encode()
# The choices of a chunk as vLLM writes them, compactly.
_CHOICE = b'"choices":[{"index":0,'
_FINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")
