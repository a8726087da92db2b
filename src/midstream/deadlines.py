"""Waits on an event loop that end, and lose no cancellation on any Python: `asyncio.wait_for` of
3.10 and 3.11 drops one in the turn in which a result is ready, and 3.10 cannot tell two of one turn
apart, as anyio's scopes must. `asyncio.wait` cancels nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

_LOGGER = logging.getLogger(__name__)

END_SECONDS = 10.0
# A task that still runs is cancelled again: a library that it calls may have lost the first one.
_AGAIN_SECONDS = 2.0

T = TypeVar("T")


async def within(
    seconds: float, work: Awaitable[T], undo: Callable[[T], object] | None = None
) -> T:
    """Return an awaitable's result in time; else, or with the caller, it is cancelled or undone."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
        await end_tasks((task,))
    except asyncio.CancelledError:
        if undo is not None:
            task.add_done_callback(partial(_undo, undo))
        await end_tasks((task,))
        raise
    if not done and (not task.done() or task.cancelled()):
        raise asyncio.TimeoutError
    return task.result()


@asynccontextmanager
async def locked(lock: asyncio.Lock, seconds: float) -> AsyncIterator[None]:
    await within(seconds, lock.acquire(), lambda _: lock.release())
    try:
        yield
    finally:
        lock.release()


def _undo(undo: Callable[[T], object], task: asyncio.Future[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        undo(task.result())


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of awaitables, which run at the same time. If one fails, or the caller is
    cancelled, the others are cancelled, and have ended when the error is raised.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Iterable[asyncio.Future[Any]], seconds: float = END_SECONDS) -> None:
    """Cancel tasks, and wait until they end. What they raise is dropped; those left are logged."""
    tasks = tuple(tasks)
    left = {task for task in tasks if not task.done()}
    until = time.monotonic() + seconds
    while left:
        for task in left:
            task.cancel()
        rest = max(0.0, until - time.monotonic())
        _, left = await asyncio.wait(left, timeout=min(rest, _AGAIN_SECONDS))
        if left and rest <= _AGAIN_SECONDS:
            names = ", ".join(sorted(map(repr, left)))
            _LOGGER.error("did not end within %g s of being cancelled: %s", seconds, names)
            break
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # otherwise the loop logs that nobody looked at it
