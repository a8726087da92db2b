"""Sink `webhook`: posts batches of events, with ids by which a receiver drops repeated ones."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import httpx

from midstream.config.event_sinks import WebhookSettings, secret_of, url_of
from midstream.deadlines import within
from midstream.sinks.events.base import DELIVERED, EventSink, SendResult, SinkEvent
from midstream.version import __version__

SIGNATURE = "x-midstream-signature"
_RETRIED = (408, 429)
_CLOSE_SECONDS = 1.0


class WebhookSink(EventSink):
    """Posts `{"events": [...]}`. Only an answer 2xx says that a batch was received; redirects are
    not followed, and proxies and passwords of the environment are not used.
    """

    def __init__(self, settings: WebhookSettings) -> None:
        """Read the URL and the key. Raises ConfigError."""
        self._url = url_of(settings)
        self._secret = secret_of(settings)
        self.backoff_seconds = settings.backoff_seconds
        self.most_backoff_seconds = settings.most_backoff_seconds
        # Its own loop, whose waits end in time, whatever the receiver does byte by byte.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def send(self, batch: Sequence[SinkEvent], seconds: float) -> SendResult:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        body = b'{"events":[' + b",".join(event.data for event in batch) + b"]}"
        return self._loop.run_until_complete(self._post(body, seconds))

    def close(self) -> None:
        if self._loop is None:
            return
        if self._client is not None:
            self._loop.run_until_complete(within(_CLOSE_SECONDS, self._client.aclose()))
        self._loop.close()

    async def _post(self, body: bytes, seconds: float) -> SendResult:
        if self._client is None:
            self._client = httpx.AsyncClient(trust_env=False, timeout=None)
        try:
            return await within(seconds, self._answer(self._client, body))
        except asyncio.TimeoutError:
            return SendResult(f"no answer within {seconds:g} s", may_retry=True)
        except httpx.HTTPError as error:
            # The text of some of these has the URL, which may be secret.
            return SendResult(f"the connection failed: {type(error).__name__}", may_retry=True)

    async def _answer(self, client: httpx.AsyncClient, body: bytes) -> SendResult:
        async with client.stream("POST", self._url, content=body, headers=self._headers(body)) as (
            answer
        ):
            return result_of(answer.status_code, answer.headers)

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {
            "content-type": "application/json",
            "idempotency-key": hashlib.sha256(body).hexdigest(),
            "user-agent": f"midstream/{__version__}",
        }
        if self._secret is not None:
            headers[SIGNATURE] = signature(self._secret, int(time.time()), body)
        return headers


def signature(secret: bytes, seconds: int, body: bytes) -> str:
    """Return `t=SECONDS,v1=HEX`: HMAC-SHA256 of `SECONDS.BODY`, so that old bodies are known."""
    digest = hmac.new(secret, b"%d." % seconds + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def result_of(status: int, headers: Mapping[str, str]) -> SendResult:
    """Return what an answer's status means for a batch."""
    if 200 <= status < 300:
        return DELIVERED
    may_retry = status >= 500 or status in _RETRIED
    return SendResult(
        f"the answer was {status}", may_retry, _seconds_of(headers.get("retry-after"))
    )


def _seconds_of(retry_after: str | None) -> float:
    """Return the seconds of a header `Retry-After`: a number or a date; else 0."""
    if retry_after is None:
        return 0.0
    if retry_after.isascii() and retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        date = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())
