"""Who captures the lines of a job: an engine in this process, or engines elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.errors import ReceiptWarning
from midstream.jobs.engine import Engine
from midstream.jobs.job import Job
from midstream.jobs.records import Failed, Record
from midstream.jobs.store_writer import StoreWriter


@dataclass(frozen=True, slots=True)
class Captured:
    """A line whose rows came.

    Attributes:
        line: where in the data it is.
        rows: how many it has.
        nbytes: that these take, encoded.
    """

    line: int
    rows: int
    nbytes: int


class Executor(Protocol):
    """Takes prompts, and sees to it that their rows get into the store.

    Attributes:
        window: how many prompts it should have, so that it never waits for one.
        stored: how many lines it has put into the store for good.
    """

    @property
    def window(self) -> int: ...

    @property
    def stored(self) -> int: ...

    def add(self, request: str, record: Record) -> None:
        """Takes a prompt, whose rows are to be stored under an id.

        Raises:
            SpecError: it cannot be taken, as `Engine.add` says.
        """
        ...

    def step(self) -> Sequence[Captured | Failed]:
        """Works for a while; what has ended. Each prompt that was added ends once.

        Raises:
            StoreError: rows cannot be written.
            Exception: whatever an engine raises that breaks.
        """
        ...

    def close(self) -> Sequence[Captured | Failed]:
        """Sees to it that what came is in the store, and lets go of prompts that did not end; what
        else has ended until then. Raises as `step` does.
        """
        ...


class LocalExecutor:
    """One engine in this process, and the store's writer beside it."""

    def __init__(self, job: Job, engine: Engine) -> None:
        """Raises:
        StoreError: the store cannot be written to.
        """
        self._engine = engine
        self._keeper = StoreWriter(job, engine.origin)
        self._ids: dict[int, str] = {}  # of what the engine has

    @property
    def window(self) -> int:
        return self._engine.window

    @property
    def stored(self) -> int:
        return self._keeper.stored

    def add(self, request: str, record: Record) -> None:
        self._engine.add(record)
        self._ids[record.line] = request

    def step(self) -> Sequence[Captured | Failed]:
        found: list[Captured | Failed] = []
        # The job reads the receipts; warnings of them would say the same again.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReceiptWarning)
            replies = self._engine.step()
        for reply in replies:
            request = self._ids.pop(reply.line)
            if isinstance(reply, Failed):
                found.append(reply)
            else:
                found.append(Captured(reply.line, *self._keeper.put(request, reply)))
        self._keeper.check()
        return found

    def close(self) -> Sequence[Captured | Failed]:
        self._keeper.close()
        return ()
