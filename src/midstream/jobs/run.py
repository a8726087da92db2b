"""A dataset capture: prompts are read as the engine takes them, and rows written as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from midstream.errors import SpecError, StoreError
from midstream.jobs.directory_lock import errors_file, taken
from midstream.jobs.engine import Engine, start_vllm
from midstream.jobs.failed_lines import Failures
from midstream.jobs.job import Job
from midstream.jobs.local_executor import Captured, Executor, LocalExecutor
from midstream.jobs.records import Failed, Record
from midstream.jobs.request_ids import CompletedLines, Identity
from midstream.jobs.sources import open_source


@dataclass(slots=True)
class Counts:
    """How far a job is.

    Attributes:
        total: lines that there are to read; None: that is not known.
        skipped: lines that the store had when it began.
        captured: lines that the engine has answered.
        stored: of these, those that are in the store for good.
        failed: lines of which there are no rows.
        rows: of what was captured.
        nbytes: that these take, encoded.
        seconds: since the first prompt was handed to the engine.
    """

    total: int | None = None
    skipped: int = 0
    captured: int = 0
    stored: int = 0
    failed: int = 0
    rows: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Lines that are behind it."""
        return self.skipped + self.captured + self.failed


@dataclass(frozen=True, slots=True)
class Summary:
    """What a job did.

    Attributes:
        out: where the store is.
        counts: how far it came.
        errors: the file that has the lines that failed; None: none did, or there is no file.
        interrupted: whether it ended before its data did.
    """

    out: str
    counts: Counts
    errors: str | None
    interrupted: bool

    @property
    def status(self) -> int:
        """0: all lines are in the store; 1: some are not."""
        return int(self.interrupted or self.counts.failed > 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "out": self.out,
            "status": self.status,
            **asdict(self.counts),
            "errors": self.errors,
            "interrupted": self.interrupted,
        }


class Watch(Protocol):
    """Is told how a job gets on, by the thread that runs it."""

    def moved(self, counts: Counts) -> None:
        """Something has come, or was passed over."""
        ...

    def failed(self, failed: Failed) -> None:
        """There are no rows of a line."""
        ...


class _Silent:
    def moved(self, counts: Counts) -> None:
        return

    def failed(self, failed: Failed) -> None:
        return


class CaptureRun:
    """One job: its data and its store are there. As a context, it gives the store back.

    Attributes:
        job: what to do.
        counts: how far it is.
        has_begun: whether the engine has started.
        engines: what captures, in words.
    """

    engines = "vLLM"

    def __init__(self, job: Job) -> None:
        """Checks all that can be known before an engine is started.

        Raises:
            SpecError: the data is not there, or has not the column of the prompts.
            StoreError: the store is not empty, or is one of other data or terms; or somebody else
                captures into it.
            UnsupportedError: a library is missing that would read the data.
        """
        self.counts = Counts()
        self.has_begun = False
        self.job = job
        self._identity = Identity(job)
        self._given: set[int] = set()  # lines that the executor has
        self._at_end = False  # of the data
        self._source = open_source(job)
        with ExitStack() as stack:
            self._done = CompletedLines(job, stack.enter_context(taken(job)))
            if self._source.can_be_read_again:
                self._done.check(self._source)
            self._failures = Failures(errors_file(job))
            stack.callback(self._failures.close)
            self.counts.total = self._source.count()
            self._stack = stack.pop_all()

    def __enter__(self) -> CaptureRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def stored_before(self) -> int:
        """How many lines the store had when this began."""
        return len(self._done)

    @property
    def summary(self) -> Summary:
        """What it has done so far."""
        errors = self._failures.path if self._failures.count else None
        is_whole = self._at_end and not self._given
        return Summary(self.job.out, self.counts, errors, interrupted=not is_whole)

    def work(
        self,
        start: Callable[[Job], Engine] = start_vllm,
        watch: Watch | None = None,
        stop: threading.Event | None = None,
    ) -> Summary:
        """Captures until the data ends. Whatever ends it, what had come is in the store.

        Args:
            start: makes the engine.
            watch: is told how it gets on.
            stop: is set when it is to end before its data does.

        Raises:
            StoreError: rows cannot be written; or this is not the data that is in the store.
            Exception: whatever the engine raises when it cannot start, or breaks.
        """
        return self.work_on(lambda job: LocalExecutor(job, start(job)), watch, stop)

    def work_on(
        self,
        executor: Callable[[Job], Executor],
        watch: Watch | None = None,
        stop: threading.Event | None = None,
    ) -> Summary:
        """As `work`, on whatever captures: an engine here, or many elsewhere.

        Args:
            executor: makes it, and returns when it can work.
            watch, stop: as of `work`.
        """
        self._watch = watch or _Silent()
        self._stop = stop or threading.Event()
        self._executor = executor(self.job)
        try:
            self._failures.begin()
        except BaseException:
            self._executor.close()
            raise
        self.has_begun = True
        began = time.monotonic()
        try:
            self._run(began)
        except StoreError:
            raise
        except Exception:
            # Who stops it from a keyboard has stopped the engine's processes as well.
            if not self._stop.is_set():
                raise
        finally:
            try:
                self._take(self._executor.close())
            finally:
                self.counts.stored = self._executor.stored
                self.counts.seconds = time.monotonic() - began
        self._moved()
        return self.summary

    def _run(self, began: float) -> None:
        records = self._missing()
        while self._fill(records):
            self._take(self._executor.step())
            self.counts.seconds = time.monotonic() - began
            self._moved()

    def _fill(self, records: Iterator[Record]) -> bool:
        """Hands on as many prompts as there should be; False: there is nothing to do."""
        while len(self._given) < self._executor.window and not self._stop.is_set():
            record = next(records, None)
            if record is None:
                break
            try:
                self._executor.add(self._identity.id(record), record)
            except SpecError as error:
                self._fail(Failed(record.line, str(error)))
            else:
                self._given.add(record.line)
        return bool(self._given) and not self._stop.is_set()

    def _missing(self) -> Iterator[Record]:
        """The prompts that the store has not."""
        for record in self._source:
            if isinstance(record, Failed):
                self._fail(record)
            elif not self._done.has(record):
                yield record
            else:
                self.counts.skipped += 1
                self._moved()
            if self._stop.is_set():
                return
        self._at_end = True

    def _take(self, ended: Sequence[Captured | Failed]) -> None:
        for one in ended:
            self._given.remove(one.line)
            if isinstance(one, Failed):
                self._fail(one)
            else:
                self.counts.captured += 1
                self.counts.rows += one.rows
                self.counts.nbytes += one.nbytes

    def _fail(self, failed: Failed) -> None:
        self.counts.failed += 1
        self._failures.add(failed)
        self._watch.failed(failed)
        self._moved()

    def _moved(self) -> None:
        self.counts.stored = self._executor.stored
        self._watch.moved(self.counts)


def capture_dataset(
    job: Job,
    start: Callable[[Job], Engine] = start_vllm,
    watch: Watch | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Captures a data set. Arguments and exceptions are those of `CaptureRun` and its `work`."""
    with CaptureRun(job) as capturing:
        return capturing.work(start, watch, stop)
