"""Coordinator of a job's chunks on Ray, which repeats the work of a dead process without limit.

It counts attempts, so that a line that kills every engine is found: from the third attempt on, a
chunk's lines are run one at a time. An engine that always dies is not restarted forever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from midstream.deadlines import within
from midstream.lab.jobs.ray.chunks import ChunkAttempt, Lines

# The first attempt in which lines are run one at a time.
CAREFUL = 3
# Number of starts without a captured line: STARTS_EACH for each engine, and MORE_STARTS in total.
STARTS_EACH = 3
MORE_STARTS = 3
# Shards are named by time, and the clocks of a cluster's machines may differ by this much.
_CLOCKS = timedelta(hours=1)


@dataclass(slots=True)
class _Chunk:
    lines: Lines
    attempts: int = 0
    since: str = ""
    alone: int | None = None  # the line that is currently run alone
    given_up: dict[int, str] = field(default_factory=dict)


class ChunkCoordinator:
    """Stores chunks until they are finished. All methods run in one event loop."""

    def __init__(self, engines: int) -> None:
        self._most_starts = STARTS_EACH * engines + MORE_STARTS
        # Starts since the last captured line.
        self._starts = 0
        self._chunks: dict[int, _Chunk] = {}
        self._next = 0
        self._ended = False
        self._halted = False
        # Result of the first engine's start; see `started`.
        self._first: list[str] | None = None
        # Error of the last engine that broke, if it could report one.
        self._reason = ""
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ called by the job

    async def put(self, lines: Lines) -> None:
        """Add a chunk; chunks are numbered in order from 0."""
        self._chunks[self._next] = _Chunk(lines)
        self._next += 1
        self._change()

    async def end(self, halt: bool = False) -> None:
        """Declare that no more chunks follow."""
        self._ended = True
        self._halted |= halt
        self._change()

    async def done(self, number: int, captured: int) -> None:
        """Forget a finished chunk, of which this many lines were captured."""
        self._chunks.pop(number, None)
        if captured:
            self._starts = 0

    async def started(self, seconds: float) -> list[str] | None:
        """Wait for the first engine's start; return its packed error; None: not started."""
        return self._first if await self._wait(lambda: self._first is not None, seconds) else None

    # ------------------------------------------------------------ called by engines

    async def offers(self, number: int) -> bool:
        """Wait for a chunk; return False if there will be none with this number."""
        while number >= self._next and not self._ended:
            await self._changed.wait()
        return number < self._next and not self._halted

    async def join(self) -> str:
        """Register an engine that is about to start; return why it must not, or an empty text."""
        self._starts += 1
        if self._starts <= self._most_starts:
            return ""
        why = f"; last error: {self._reason}" if self._reason else ""
        return (
            f"engines were started {self._starts - 1} times and ended without capturing a line{why}"
        )

    async def report(self, error: list[str]) -> None:
        """Report the start of an engine: a packed error, empty if it succeeded."""
        if self._first is None:
            self._first = error
        self._change()

    async def begin(self, number: int) -> ChunkAttempt | None:
        """Begin an attempt at a chunk; return None if it is finished or the job was halted."""
        chunk = self._chunks.get(number)
        if chunk is None or self._halted:
            return None
        chunk.attempts += 1
        if chunk.attempts == 1:
            chunk.since = f"{datetime.now(timezone.utc) - _CLOCKS:%Y%m%dT%H%M%S}"
        if chunk.alone is not None:
            why = f": {self._reason}" if self._reason else ""
            chunk.given_up[chunk.alone] = (
                f"{chunk.attempts - 1} engines ended while they had this line, the last one while "
                f"running it alone{why}"
            )
            chunk.alone = None
        return ChunkAttempt(chunk.lines, chunk.attempts, chunk.since, dict(chunk.given_up))

    async def run_alone(self, number: int, line: int | None) -> None:
        """Report that an engine runs this line of a chunk alone; None: it has run all of them."""
        chunk = self._chunks.get(number)
        if chunk is not None:
            if chunk.alone is not None:
                self._starts = 0  # the engine has survived the previous line
            chunk.alone = line

    async def broke(self, reason: str) -> None:
        """Report that an engine has broken and its process will end."""
        self._reason = reason

    async def halted(self, seconds: float) -> bool:
        """Wait up to `seconds` for the job to be halted; return whether it is."""
        return await self._wait(lambda: self._halted, seconds)

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not condition():
            remaining = until - time.monotonic()
            if remaining <= 0:
                return False
            with suppress(asyncio.TimeoutError):
                await within(remaining, self._changed.wait())
        return True

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
