"""Loop around a job's engine: adds prompts up to its window, and matches replies to prompts."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from midstream.errors import SpecError
from midstream.lab.jobs.engine import Engine, Reply
from midstream.lab.jobs.records import Failed, Record

T = TypeVar("T")


class EngineLoop(Generic[T]):
    """Steps an engine; keeps its caller's context of each unfinished prompt. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # What the caller gave with each unfinished prompt, by line.
        self._running: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def capacity(self) -> int:
        """Number of prompts to add so that the engine stays busy."""
        return max(0, self._engine.window - len(self._running))

    def add(self, context: T, record: Record) -> None:
        self._engine.add(record)
        self._running[record.line] = context

    def fill(self, queue: deque[tuple[T, Record]]) -> list[tuple[T, Failed]]:
        """Add prompts of a queue while there is capacity; return those that were rejected."""
        rejected = []
        while queue and self.capacity:
            context, record = queue.popleft()
            try:
                self.add(context, record)
            except SpecError as error:
                rejected.append((context, Failed(record.line, str(error))))
        return rejected

    def step(self) -> list[tuple[T, Reply | Failed]]:
        if not self._running:
            return []
        return [(self._running.pop(reply.line), reply) for reply in self._engine.step()]
