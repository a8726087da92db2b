"""Where a job on Ray and its engines meet: chunks wait here, and here is known which were tried.

A desk is an actor on the machine of the job. Ray does again what was lost with an actor's process,
as often as that happens; the desk counts, so that a line which ends every engine that runs it is
found, and an engine that ends whatever it runs is not started for ever:

- A chunk is tried twice as a whole. From the third try on its lines are run one by one, each alone
  in its engine and named here before. A line with which an engine has ended then is given up.
- Where engines have been started several times each and nothing was captured between, the job ends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from midstream.jobs.ray.chunks import ChunkAttempt, Lines

# The first try at which lines are run one by one.
CAREFUL = 3
# How often each engine may be started while nothing is captured, and some more where there are few.
STARTS_EACH = 3
MORE_STARTS = 3
# Clocks of a cluster's machines differ, and shards are named by them.
_CLOCKS = timedelta(hours=1)


@dataclass(slots=True)
class _Chunk:
    lines: Lines
    attempts: int = 0
    since: str = ""
    alone: int | None = None  # the line that is being run alone
    given_up: dict[int, str] = field(default_factory=dict)


class ChunkCoordinator:
    """Keeps chunks until they are done. All methods run in one event loop."""

    def __init__(self, engines: int) -> None:
        """Args:
        engines: how many there will be.
        """
        self._most_starts = STARTS_EACH * engines + MORE_STARTS
        self._starts = 0  # since something was captured
        self._chunks: dict[int, _Chunk] = {}
        self._next = 0
        self._ended = False
        self._halted = False
        self._first: list[str] | None = None  # what became of the first engine's start
        self._reason = ""  # of the last engine that broke, as far as it could say
        self._changed = asyncio.Condition()

    # ------------------------------------------------------------ the job's

    async def put(self, lines: Lines) -> None:
        """Puts down a chunk, the next by number."""
        async with self._changed:
            self._chunks[self._next] = _Chunk(lines)
            self._next += 1
            self._changed.notify_all()

    async def end(self, halt: bool = False) -> None:
        """No other chunks follow; or even: engines are to give back those that they have."""
        async with self._changed:
            self._ended = True
            self._halted |= halt
            self._changed.notify_all()

    async def done(self, number: int, captured: int) -> None:
        """The job knows what became of a chunk.

        Args:
            number: the chunk's.
            captured: how many of its lines were.
        """
        self._chunks.pop(number, None)
        if captured:
            self._starts = 0

    async def started(self, seconds: float) -> list[str] | None:
        """Waits for an engine to start, for so long.

        Returns:
            The words of the error that it did not start for, none where it did; None: none has.
        """
        return self._first if await self._wait(lambda: self._first is not None, seconds) else None

    # ------------------------------------------------------------ the engines'

    async def offers(self, number: int) -> bool:
        """Waits for a chunk to be put down; False: there will be none of this number."""
        async with self._changed:
            await self._changed.wait_for(lambda: number < self._next or self._ended)
        return number < self._next and not self._halted

    async def join(self) -> str:
        """An engine is about to be started; why it should not be, or nothing."""
        self._starts += 1
        if self._starts <= self._most_starts:
            return ""
        why = f"; the last one: {self._reason}" if self._reason else ""
        return (
            f"engines were started {self._starts - 1} times, and ended, without a line captured "
            f"between{why}"
        )

    async def report(self, error: list[str]) -> None:
        """An engine has started; or has not, for an error in these words."""
        async with self._changed:
            if self._first is None:
                self._first = error
            self._changed.notify_all()

    async def begin(self, number: int) -> ChunkAttempt | None:
        """An engine tries a chunk; None: it is done, or is not to be done any more."""
        chunk = self._chunks.get(number)
        if chunk is None or self._halted:
            return None
        chunk.attempts += 1
        if chunk.attempts == 1:
            chunk.since = f"{datetime.now(timezone.utc) - _CLOCKS:%Y%m%dT%H%M%S}"
        if chunk.alone is not None:
            said = f": {self._reason}" if self._reason else ""
            chunk.given_up[chunk.alone] = (
                f"each of {chunk.attempts - 1} engines ended that had this line, the last one "
                f"while it ran it alone{said}"
            )
            chunk.alone = None
        return ChunkAttempt(chunk.lines, chunk.attempts, chunk.since, dict(chunk.given_up))

    async def run_alone(self, number: int, line: int | None) -> None:
        """From here on a line of a chunk is run alone; None: none is any more."""
        chunk = self._chunks.get(number)
        if chunk is not None:
            if chunk.alone is not None:
                self._starts = 0  # the engine has survived that one
            chunk.alone = line

    async def broke(self, reason: str) -> None:
        """An engine has broken, and its process will end."""
        self._reason = reason

    async def halted(self, seconds: float) -> bool:
        """Waits for the job to be halted, for so long; whether it is."""
        return await self._wait(lambda: self._halted, seconds)

    async def _wait(self, condition: object, seconds: float) -> bool:
        assert callable(condition)
        until = time.monotonic() + seconds
        async with self._changed:
            while not condition():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError:
                    return bool(condition())
        return True
