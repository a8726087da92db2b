"""The process of one engine, as Ray Data runs it: numbers of chunks come, outcomes go back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import EngineError, MidstreamError, ReceiptWarning
from midstream.jobs.directory_lock import join_writers
from midstream.jobs.engine import Engine
from midstream.jobs.job import Job
from midstream.jobs.ray.chunks import Outcome, pack_error, unpack_error
from midstream.jobs.ray.worker import Worker

_LOGGER = logging.getLogger(__name__)
CHUNK = "chunk"
OUTCOME = "outcome"
# How long one question to the desk may take.
_PATIENCE = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What each engine's process must know.

    Attributes:
        job: what is captured.
        desk: the handle of the desk's actor.
        start: makes an engine.
        word: by which it knows the job's directory; see `capturing.place`.
        folder: that the job runs in, which its relative paths begin at.
        environment: variables that are set where they are not.
    """

    job: Job
    desk: Any
    start: Callable[[Job], Engine]
    word: str
    folder: str
    environment: Mapping[str, str]


def offered(batch: dict[str, Any], desk: Any) -> Iterator[dict[str, Any]]:
    """The numbers of chunks, as they are put on a desk, until there are no others."""
    import ray

    number = 0
    while ray.get(desk.offers.remote(number)):
        yield {CHUNK: np.array([number])}
        number += 1


class EngineActor:
    """Has an engine. Raises nothing: what is wrong is in the outcomes."""

    def __init__(self, duty: EngineSpec) -> None:
        import ray

        self._ask, self._desk = ray.get, duty.desk
        for name, value in duty.environment.items():
            os.environ.setdefault(name, value)
        # Whoever reads the receipts says what they say.
        warnings.simplefilter("ignore", ReceiptWarning)
        self._error: MidstreamError | None = None
        self._worker: Worker | None = None
        try:
            refused = self._ask(self._desk.join.remote())
            if refused:
                raise EngineError(refused)
            enter(duty.folder, duty.job)
            join_writers(duty.job, duty.word)
            worker = Worker(duty.job, duty.start, self._alone, self._broke)
            worker.wait()
        except Exception as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            words = pack_error(error)
            self._error = unpack_error(words)
            self._ask(self._desk.report.remote(words))
            return
        self._worker = worker
        self._ask(self._desk.report.remote([]))
        threading.Thread(target=self._watch, name="midstream halt", daemon=True).start()

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        outcomes = await asyncio.gather(*(self._capture(int(n)) for n in batch[CHUNK]))
        yield {OUTCOME: np.array([each.to_json() for each in outcomes], dtype=object)}

    async def _capture(self, number: int) -> Outcome:
        turn = await self._desk.begin.remote(number)
        if turn is None:
            return Outcome(number)
        if self._worker is None:
            return Outcome(number, error=self._error)
        return await asyncio.wrap_future(self._worker.submit(number, turn))

    def _alone(self, number: int, line: int | None) -> None:
        self._ask(self._desk.run_alone.remote(number, line))

    def _broke(self, error: BaseException) -> None:
        """The process ends, and Ray starts another, to which all comes that this one had not done:
        of an engine that has broken nothing can be had any more, on a GPU not even its memory.
        """
        with contextlib.suppress(Exception):
            self._ask(
                self._desk.broke.remote(f"{type(error).__name__}: {error}"), timeout=_PATIENCE
            )
        os._exit(1)

    def _watch(self) -> None:
        assert self._worker is not None
        while not self._ask(self._desk.halted.remote(_PATIENCE)):
            pass
        self._worker.halt()


def enter(folder: str, job: Job) -> None:
    """Goes to the folder that the job runs in: paths are read there as it would read them.

    Raises:
        EngineError: there is none, and it matters.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        relative = [path for path in (job.out, job.model) if path.startswith(".")]
        if "://" not in job.out and not os.path.isabs(job.out):
            relative = [job.out]
        if relative:
            raise EngineError(
                f"{os.uname().nodename}: there is no folder {folder} ({error.strerror}), where "
                f"{relative[0]} is; give paths as absolute ones that all machines share"
            ) from None
