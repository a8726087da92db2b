"""Usage of the workers, also while one of them does not answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.runtime.frontend.rpc.replicas import call_all
from midstream.runtime.protocol.rpc import ReadUsage


class WorkersUsage:
    """Reader of the workers' usage, with their last answers. Call on the engine's event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._last: list[dict[str, Any]] = []
        self._read_at: float | None = None
        self._query: asyncio.Task[None] | None = None

    async def read(self, timeout: float | None) -> dict[str, Any]:
        """Return `workers`, each worker's usage, and `workers_age_seconds`, None if there was no
        answer. A query without an answer in time is not repeated before it has one.
        """
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(self._update())
        else:
            # It was not answered in an earlier call's time, or another call waits for it as well.
            timeout = timeout if timeout is None else min(timeout, 0.5)
        done, _ = await asyncio.wait([self._query], timeout=timeout)
        if done and not self._query.cancelled():
            error = self._query.exception()
            if error is None:
                return {"workers": self._last, "workers_age_seconds": 0.0}
            if not isinstance(error, EngineDeadError):
                raise error
        age = None if self._read_at is None else time.monotonic() - self._read_at
        return {"workers": self._last, "workers_age_seconds": age}

    async def _update(self) -> None:
        answers = await call_all(self._client, ReadUsage())
        self._last = [
            {"replica": number, **msgspec.structs.asdict(usage)}
            for number, usages in enumerate(answers)
            for usage in usages
        ]
        self._read_at = time.monotonic()
