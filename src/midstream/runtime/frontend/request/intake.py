"""Intake of an asynchronous engine: which calls may wait for capacity, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from midstream.errors import BusyError

_LOOK_SECONDS = 0.05  # interval of looks at the running calls


class WaitObserver(Protocol):
    """Called when a wait of a request ends, and when it begins (`seconds` is None)."""

    def __call__(self, request_id: str, seconds: float | None, /) -> object: ...


class Wait:
    """One call that waits for capacity."""

    def __init__(
        self,
        request_id: str,
        seconds: float | None,
        give_up: Callable[[BusyError], object],
        observe: WaitObserver | None,
    ) -> None:
        """Begin to wait, on the engine's event loop; `give_up` is called after `seconds`."""
        self._began = time.monotonic()
        self._id = request_id
        if observe is not None:
            observe(request_id, None)
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            error = BusyError(
                f"the request waited {seconds:g} s for capacity, the most that this server allows "
                "(http.wait_seconds); try again later",
                retry_after=max(1, round(seconds)),
            )
            self._timer = asyncio.get_running_loop().call_later(seconds, give_up, error)

    def end(self) -> None:
        """End the wait. Later calls do nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._observe is not None:
            self._observe(self._id, time.monotonic() - self._began)
        self._timer = self._observe = None


class Intake:
    """Limits on the calls of one engine that wait for capacity. Unlimited at first."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._seconds: float | None = None
        self._observe: WaitObserver | None = None
        self._is_closed = False

    def limit(self, most: int | None, seconds: float | None, observe: WaitObserver | None) -> None:
        """Set how many requests may wait at a time, how long, and who observes that."""
        self._most, self._seconds, self._observe = most, seconds, observe

    def check(self, waiting: int) -> None:
        """Check that one more request with a plan may come, while some wait."""
        if self._is_closed:
            raise BusyError("the engine shuts down; try another server, or again later", 5)
        if self._most is not None and waiting >= self._most:
            raise BusyError(
                f"{waiting} requests wait for capacity, the most that this server allows "
                "(http.waiting_requests); try again later",
                retry_after=5,
            )

    def close(self) -> None:
        """Accept no more requests. May be called from any thread."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def drain(self, seconds: float, has_calls: Callable[[], bool]) -> float:
        """Accept no more requests with a plan, and wait until the calls with one have ended; return
        the seconds left. Call from another thread than the event loop's, on which they end.
        """
        self.close()
        end = time.monotonic() + seconds
        while has_calls() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return max(0.0, end - time.monotonic())

    def begin_wait(self, request_id: str, give_up: Callable[[BusyError], object]) -> Wait:
        return Wait(request_id, self._seconds, give_up, self._observe)
