"""When the runs of sweeps may start: ordinary requests go first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from midstream.api.sweep_calls import Traffic
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
    """Limits the sweeps and fits of one server, and the runs of all at a time. Not thread-safe.

    Attributes:
        sweeps: number of sweeps and fits that have begun and not ended.
        running: number of runs that have had their turn and not ended.
    """

    def __init__(self, most_sweeps: int) -> None:
        """Create it.

        Args:
            most_sweeps: most sweeps at the same time.
        """
        self._most = most_sweeps
        self.sweeps = 0
        self.running = 0
        self._first = asyncio.Lock()  # held by the run that has the next turn; others queue
        self._ended = asyncio.Event()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Count a sweep.

        Raises:
            HttpError: 503, there are as many as may be.
        """
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
    async def turn(self, traffic: Callable[[], Traffic], by_priority: bool) -> AsyncIterator[None]:
        """Wait until a run may start, and count it within the context.

        If the scheduler goes by priorities, a run starts if the engine has a seat for it, as the
        scheduler takes care of the rest. Otherwise sweeps have a quarter of the seats, and no run
        starts while an ordinary request has no token yet, or while ordinary requests would take all
        seats. In either case none starts while requests wait for capacity for their plans.

        Args:
            traffic: returns what the engine does.
            by_priority: whether the scheduler goes by the priorities of requests.
        """
        async with self._first:
            while not self._is_free(traffic(), by_priority):
                self._ended.clear()
                with suppress(asyncio.TimeoutError):
                    await within(_LOOK_SECONDS, self._ended.wait())
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._ended.set()

    def _is_free(self, now: Traffic, by_priority: bool) -> bool:
        if now.waiting:
            return False
        if by_priority:
            return self.running < now.seats
        if now.starting or now.requests + self.running >= now.seats:
            return False
        return self.running < max(1, now.seats // _SEATS)


def runs_at_once(seats: int, step_tokens: int, length: int, by_priority: bool) -> int:
    """Return the most runs of one sweep at the same time.

    Without priorities they take at most half the tokens of a step, so that an ordinary request that
    comes among them begins in the next step.

    Args:
        seats: number of requests that the engine computes at the same time.
        step_tokens: most tokens of a step.
        length: number of tokens of a run.
        by_priority: whether the scheduler goes by the priorities of requests.
    """
    if by_priority:
        return seats
    return max(1, min(seats // _SEATS, step_tokens // (_TOKENS * length)))
