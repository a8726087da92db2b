"""An answer on its way out: results are put into it, be it one body or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from midstream.config import KEY
from midstream.errors import MidstreamError
from midstream.serving.exchange import Exchange
from midstream.serving.refusals import Refusal, read_error
from midstream.serving.sse import DONE, Event, Events

if TYPE_CHECKING:
    from midstream.serving.server import Server


class Outgoing:
    """Takes the place of an application's `send`."""

    def __init__(
        self,
        exchange: Exchange,
        server: Server,
        send: Send,
        refused: Callable[[int, str | None], None],
    ) -> None:
        """Args:
        exchange: the request's.
        server: makes what answers say.
        send: where messages go.
        refused: is told of a refusal in a stream that has begun, whose status is not seen.
        """
        self._refused = refused
        self._exchange = exchange
        self._server = server
        self._send = send
        self._start: Message | None = None  # held until it is known how it goes on
        self._streams = False
        self._is_first = True  # no event but comments has come yet
        self._events = Events()
        self._parts: list[bytes] = []
        self._over = False

    async def __call__(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body" and self._streams:
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
        if start["status"] == 200:
            try:
                body = await self._with_results(body)
            except (Refusal, MidstreamError) as error:
                refusal = Refusal.of(error)
                body = refusal.content
                start = {**start, "status": refusal.status}
        else:
            body = self._naming(body)
        start = {**start, "headers": list(start["headers"])}
        MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
        if start["status"] == 200:
            self._exchange.untold.clear()

    async def _with_results(self, body: bytes) -> bytes:
        value = json.loads(body)
        told = {
            choice: await self._server.answers.tell(self._exchange, choice, news)
            for choice, news in sorted(self._exchange.take().items())
        }
        if told and "choices" not in value:
            value[KEY] = _of_response(list(told.values()))
        for choice in value.get("choices", ()):
            if told.get(choice["index"]):
                holder = value if self._exchange.is_single else choice
                holder[KEY] = told[choice["index"]]
        return json.dumps(value).encode()

    def _naming(self, body: bytes) -> bytes:
        """An error that vLLM makes of ours, with the field that is wrong."""
        wrong = self._exchange.wrong
        value = read_error(body) if wrong else None
        if value is None or value["error"].get("param") is not None:
            return body
        value["error"]["param"] = wrong
        return json.dumps(value).encode()

    # -- as a stream -----------------------------------------------------------------------------

    async def _stream(self, message: Message) -> None:
        out = []
        for event in self._events.feed(message.get("body", b"")):
            if self._start and self._is_first and await self._refuse_at_once(event):
                return
            self._is_first = self._is_first and not event.data
            try:
                out += await self._with_news(event)
            except (Refusal, MidstreamError) as error:
                refusal = Refusal.of(error)
                self._refused(refusal.status, refusal.param)
                out += [Event(b"", refusal.content), Event(b"", DONE)]
                self._over = True
                break
        more = message.get("more_body", False) and not self._over
        if not more and not self._over and self._events.rest:
            out.append(Event(b"", b"", self._events.rest))
        if out or not more:
            await self._begin()
            body = b"".join(event.written for event in out)
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            if not self._over:
                self._exchange.untold.clear()

    async def _begin(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)

    async def _refuse_at_once(self, event: Event) -> bool:
        """A stream that begins with an error is an error, of its own status."""
        value = event.value
        error = value.get("error") if isinstance(value, dict) else None
        status = error.get("code") if isinstance(error, dict) else None
        if not isinstance(status, int) or not 400 <= status < 600:
            return False
        self._over = True
        body = self._naming(event.data)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        return True

    async def _with_news(self, event: Event) -> list[Event]:
        """An event with what is new of its choices."""
        if event.data == DONE:
            # What no event of its choice has told.
            left = await self._left()
            return [*left, event]
        value = event.value
        if not isinstance(value, dict):
            return [event]
        if value.get("type") in _LAST_OF_RESPONSES:
            told = await self._all()
            if told:
                value[KEY] = _of_response(told)
            return [event.saying(value)]
        changed = False
        for choice in value.get("choices") or ():
            index = choice.get("index")
            news = self._exchange.news.get(index)
            if news is None:
                continue
            del self._exchange.news[index]
            told_of = await self._server.answers.tell(self._exchange, index, news)
            if told_of:
                holder = value if self._exchange.is_single else choice
                holder[KEY], changed = told_of, True
        return [event.saying(value) if changed else event]

    async def _left(self) -> list[Event]:
        found = []
        for choice, news in sorted(self._exchange.take().items()):
            told = await self._server.answers.tell(self._exchange, choice, news)
            if told:
                value: dict[str, Any] = {"object": KEY, "choices": []}
                if self._exchange.is_single:
                    value[KEY] = told
                else:
                    value["choices"] = [{"index": choice, KEY: told}]
                found.append(Event(b"", b"").saying(value))
        return found

    async def _all(self) -> list[dict[str, Any]]:
        taken = sorted(self._exchange.take().items())
        return [await self._server.answers.tell(self._exchange, nth, news) for nth, news in taken]


def _of_response(told: list[dict[str, Any]]) -> dict[str, Any]:
    """What a Response says, which has no choices: it may have called the engine several times."""
    return told[0] if len(told) == 1 else {"turns": told}


_LAST_OF_RESPONSES = ("response.completed", "response.incomplete", "response.failed")
