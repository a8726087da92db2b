"""Executors of a job's lines: the protocol, and the one with an engine in this process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.errors import ReceiptWarning
from midstream.lab.jobs.engine import Engine
from midstream.lab.jobs.engine_loop import EngineLoop
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.store_writer import StoreWriter


@dataclass(frozen=True, slots=True)
class CapturedLine:
    """A captured line."""

    line: int  # number in the data, from 1
    rows: int
    nbytes: int  # of the encoded rows


class Executor(Protocol):
    """Captures prompts and writes their rows; `window` unfinished prompts keep it busy."""

    @property
    def window(self) -> int: ...

    @property
    def stored(self) -> int: ...

    def add(self, request: str, record: Record) -> None:
        """Add a prompt, whose rows are stored under a request id."""
        ...

    def step(self) -> Sequence[CapturedLine | Failed]:
        """Run for a while and return the lines that finished, each added prompt exactly once."""
        ...

    def close(self) -> Sequence[CapturedLine | Failed]:
        """Write captured rows and drop unfinished prompts; return lines that finished meanwhile."""
        ...


class LocalExecutor:
    """Executor with one engine in this process and a store writer."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self._engine = engine
        self._writer = StoreWriter(job, engine.origin)
        self._loop: EngineLoop[str] = EngineLoop(engine)  # with request ids

    @property
    def window(self) -> int:
        return self._engine.window

    @property
    def stored(self) -> int:
        return self._writer.stored

    def add(self, request: str, record: Record) -> None:
        self._loop.add(request, record)

    def step(self) -> Sequence[CapturedLine | Failed]:
        outcomes: list[CapturedLine | Failed] = []
        # The job reads the receipts, so warnings about them would be duplicates.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReceiptWarning)
            replies = self._loop.step()
        for request, reply in replies:
            if isinstance(reply, Failed):
                outcomes.append(reply)
            else:
                outcomes.append(CapturedLine(reply.line, *self._writer.put(request, reply)))
        self._writer.check()
        return outcomes

    def close(self) -> Sequence[CapturedLine | Failed]:
        self._writer.close()
        return ()
