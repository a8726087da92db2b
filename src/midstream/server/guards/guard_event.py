"""`GuardEvent`: a guard acted on one completion; and the sending of events to webhooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from midstream.server import audit_log
from midstream.steering.guard_definition import Webhook

QUEUED, SENT_AT_ONCE = 256, 4  # events that wait for webhooks, and that are on their way
_SHOWN = 200  # characters of an error in the log
_SHUTDOWN = "the server shuts down"


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A guard acted.

    Attributes:
        guard, version: its name and version.
        action: what it did.
        position: of the token whose score met the condition, prompt first; None: it has no probe.
        score: the pooled score there; None: it has no probe.
        request_id: vLLM's id of the request.
        completion: index of the completion, with n > 1.
        client: fingerprint of the client's API key, or its address.
        model: the model or adapter.
        text: the end of the generated text; None: the guard does not ask for it.
    """

    guard: str
    version: int
    action: str
    position: int | None
    score: float | None
    request_id: str
    completion: int
    client: str
    model: str
    text: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Webhooks:
    """Sends events to the webhooks of guards, beside requests. Call on the event loop."""

    def __init__(self, on_drop: Callable[[], None]) -> None:
        """Create it; `on_drop` is called for each event that is not delivered."""
        self._on_drop = on_drop
        self._queue: asyncio.Queue[tuple[Webhook, GuardEvent]] = asyncio.Queue(QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._http: httpx.AsyncClient | None = None

    def send(self, webhook: Webhook, event: GuardEvent) -> None:
        """Queue an event; drop it if the queue is full."""
        if not self._tasks:
            self._http = httpx.AsyncClient(follow_redirects=False)
            self._tasks = [asyncio.create_task(self._work()) for _ in range(SENT_AT_ONCE)]
        try:
            self._queue.put_nowait((webhook, event))
        except asyncio.QueueFull:
            self._drop(event, "too many events wait")

    def close(self) -> None:
        """Stop; events that wait are dropped."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        while not self._queue.empty():
            self._drop(self._queue.get_nowait()[1], _SHUTDOWN)

    async def _work(self) -> None:
        assert self._http is not None
        while True:
            webhook, event = await self._queue.get()
            try:
                sending = self._http.post(
                    webhook.url, json=event.to_dict(), timeout=webhook.seconds
                )
                # httpx's timeout is one of each part of an exchange.
                answer = await asyncio.wait_for(sending, webhook.seconds)
            except asyncio.CancelledError:
                self._drop(event, _SHUTDOWN)
                raise
            except (httpx.HTTPError, asyncio.TimeoutError) as error:
                self._drop(event, str(error) or type(error).__name__)
                continue
            if not answer.is_success:
                self._drop(event, f"it answered with the status {answer.status_code}")

    def _drop(self, event: GuardEvent, problem: str) -> None:
        self._on_drop()
        audit_log.log_event(
            "guard.webhook_failed",
            guard=event.guard,
            version=event.version,
            request_id=event.request_id,
            problem=problem[:_SHOWN],
        )
