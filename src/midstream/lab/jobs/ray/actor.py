"""Ray Data actor with one engine: receives chunk numbers and returns outcomes."""

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
from midstream.lab.jobs.directory_lock import join_writers
from midstream.lab.jobs.engine import Engine
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.ray.chunks import Outcome, pack_error, unpack_error
from midstream.lab.jobs.ray.worker import Worker

_LOGGER = logging.getLogger(__name__)
CHUNK = "chunk"
OUTCOME = "outcome"
# Time limit of one call of the coordinator, in seconds.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Arguments of each engine's process."""

    job: Job
    coordinator: Any  # handle of the `ChunkCoordinator` actor
    start: Callable[[Job], Engine]
    marker: str  # see `midstream.lab.jobs.directory_lock.mark`
    folder: str  # which the job's relative paths refer to
    environment: Mapping[str, str]  # to set where unset


def chunk_numbers(batch: dict[str, Any], coordinator: Any) -> Iterator[dict[str, Any]]:
    """Yield the numbers of the coordinator's chunks as they are added, until there are no more."""
    import ray

    number = 0
    while ray.get(coordinator.offers.remote(number)):
        yield {CHUNK: np.array([number])}
        number += 1


class EngineActor:
    """Actor with an engine. It never raises: errors are part of the outcomes."""

    def __init__(self, spec: EngineSpec) -> None:
        import ray

        self._get, self._coordinator = ray.get, spec.coordinator
        for name, value in spec.environment.items():
            os.environ.setdefault(name, value)
        # The worker reads the receipts, so warnings about them would be duplicates.
        warnings.simplefilter("ignore", ReceiptWarning)
        self._error: MidstreamError | None = None
        self._worker: Worker | None = None
        try:
            refused = self._get(self._coordinator.join.remote())
            if refused:
                raise EngineError(refused)
            enter(spec.folder, spec.job)
            join_writers(spec.job, spec.marker)
            worker = Worker(spec.job, spec.start, self._announce_line, self._handle_broken)
            worker.wait()
        except Exception as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            words = pack_error(error)
            self._error = unpack_error(words)
            self._get(self._coordinator.report.remote(words))
            return
        self._worker = worker
        self._get(self._coordinator.report.remote([]))
        threading.Thread(target=self._wait_for_halt, name="midstream halt", daemon=True).start()

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        outcomes = await asyncio.gather(*(self._capture(int(n)) for n in batch[CHUNK]))
        yield {OUTCOME: np.array([outcome.to_json() for outcome in outcomes], dtype=object)}

    async def _capture(self, number: int) -> Outcome:
        attempt = await self._coordinator.begin.remote(number)
        if attempt is None:
            return Outcome(number)
        if self._worker is None:
            return Outcome(number, error=self._error)
        return await asyncio.wrap_future(self._worker.submit(number, attempt))

    def _announce_line(self, number: int, line: int | None) -> None:
        self._get(self._coordinator.run_alone.remote(number, line))

    def _handle_broken(self, error: BaseException) -> None:
        """End the process, because not even a GPU's memory can be freed; Ray starts another."""
        with contextlib.suppress(Exception):
            self._get(
                self._coordinator.broke.remote(f"{type(error).__name__}: {error}"),
                timeout=_PATIENCE,
            )
        os._exit(1)

    def _wait_for_halt(self) -> None:
        assert self._worker is not None
        while not self._get(self._coordinator.halted.remote(_PATIENCE)):
            pass
        self._worker.halt()


def enter(folder: str, job: Job) -> None:
    """Change to the job's working directory, so that relative paths mean the same as in the job."""
    try:
        os.chdir(folder)
    except OSError as error:
        relative = [path for path in (job.out, job.model) if path.startswith(".")]
        if "://" not in job.out and not os.path.isabs(job.out):
            relative = [job.out]
        if relative:
            raise EngineError(
                f"{os.uname().nodename}: there is no folder {folder} ({error.strerror}), which "
                f"{relative[0]} is relative to; use absolute paths that all machines share"
            ) from None
