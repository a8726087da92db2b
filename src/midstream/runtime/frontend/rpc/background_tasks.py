"""Tasks of an event loop that no caller waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

_LOGGER = logging.getLogger(__name__)


class BackgroundTasks:
    """The background tasks of one engine. Keeps them alive, and logs their errors."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    async def wait(self) -> None:
        """Wait until there are no tasks, including those that tasks start."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks. May be called from any thread."""
        for task in list(self._tasks):
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # The callers of a dead engine get its error themselves.
        if error is not None and not isinstance(error, EngineDeadError):
            _LOGGER.error("midstream's work for a request failed", exc_info=error)
