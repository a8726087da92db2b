"""Loop around a job's engine: adds prompts up to its window, and matches replies to prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Generic, TypeVar

from midstream.errors import SpecError
from midstream.lab.jobs.engine import Engine, Reply
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Failed, Record

T = TypeVar("T")


class EngineLoop(Generic[T]):
    """Steps an engine; keeps its caller's context of each unfinished prompt. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Each unfinished prompt, and what the caller gave with it, by line.
        self._running: dict[int, tuple[T, Record]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def capacity(self) -> int:
        """Number of prompts to add so that the engine stays busy."""
        return max(0, self._engine.window - len(self._running))

    def add(self, context: T, record: Record) -> None:
        self._engine.add(record)
        self._running[record.line] = context, record

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
        replies = []
        for reply in self._engine.step():
            context, record = self._running.pop(reply.line)
            replies.append((context, _completed(reply, record)))
        return replies


def _completed(reply: Reply | Failed, record: Record) -> Reply | Failed:
    """Return a reply with what an engine does not know of a prompt that it gets as token ids."""
    prompt = record.prompt
    if isinstance(reply, Failed) or not isinstance(prompt, PromptTokens):
        return reply
    return replace(reply, prompt=prompt.text or reply.prompt, parts=prompt.parts)
