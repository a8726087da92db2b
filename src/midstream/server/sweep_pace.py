"""When the runs of sweeps and fits may start: ordinary requests go first, for a limited time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from midstream.api.traffic import Traffic
from midstream.deadlines import within
from midstream.errors import HttpError

# vLLM's scheduler computes requests with a larger number later; ordinary requests have 0, or what
# their client gives.
PRIORITY = 1 << 30
# Part of the engine's seats, and of the tokens of a step, that sweeps take at most.
_SEATS, _TOKENS = 4, 2
_LOOK_SECONDS = 0.01  # interval of looks at the engine, while a run waits for its turn
_RETRY_SECONDS = 5


class SweepPace:
    """Limits the sweeps and fits of one server, and the runs of all at a time. Not thread-safe."""

    def __init__(self, most_sweeps: int, wait_seconds: float) -> None:
        self._most = most_sweeps
        self.wait_seconds = wait_seconds
        self.sweeps = 0
        self.running = 0
        self._first = asyncio.Lock()  # held by the run that has the next turn; others queue
        self._ended = asyncio.Event()

    @contextmanager
    def begun(self) -> Iterator[None]:
        if self.sweeps >= self._most:
            raise HttpError(
                503,
                f"{self.sweeps} sweeps and fits are running, the most that this server allows "
                "(http.running_sweeps); try again later",
                retry_after=_RETRY_SECONDS,
            )
        self.sweeps += 1
        try:
            yield
        finally:
            self.sweeps -= 1

    @asynccontextmanager
    async def turn(
        self, traffic: Callable[[], Traffic], by_priority: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Wait until a run may start, and count it; yields arguments for `generate`. Ordinary
        requests go first: without priorities sweeps have a quarter of the seats. After
        `wait_seconds` a run starts alone.
        """
        async with self._first:
            until = time.monotonic() + self.wait_seconds
            while not (is_free := self._is_free(traffic(), by_priority)):
                if not self.running and time.monotonic() >= until:
                    break
                self._ended.clear()
                with suppress(asyncio.TimeoutError):
                    await within(_LOOK_SECONDS, self._ended.wait())
            self.running += 1
        try:
            yield {"priority": PRIORITY if by_priority and is_free else 0}
        finally:
            self.running -= 1
            self._ended.set()

    def _is_free(self, now: Traffic, by_priority: bool) -> bool:
        if now.waiting or now.requests + self.running >= now.seats:
            return False
        if by_priority:
            return True
        return not now.starting and self.running < max(1, now.seats // _SEATS)


def runs_at_once(seats: int, step_tokens: int, length: int, by_priority: bool) -> int:
    """Return the most runs of one sweep, each of `length` tokens, at the same time."""
    if by_priority:
        return seats
    return max(1, min(seats // _SEATS, step_tokens // (_TOKENS * length)))
