"""Dataset capture: streams prompts into an executor and its captured rows into the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from midstream.errors import SpecError, StoreError
from midstream.lab.jobs.directory_lock import errors_file, taken
from midstream.lab.jobs.engine import Engine, start_vllm
from midstream.lab.jobs.failed_lines import Failures
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.local_executor import CapturedLine, Executor, LocalExecutor
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.prompts import open_prompts
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.request_ids import CompletedLines, Identity


@dataclass(slots=True)
class Counts:
    """Progress of a job.

    Attributes:
        total: number of lines to read; None if unknown.
        skipped: lines that were in the store before the job began.
        captured: lines that the engine has finished.
        stored: captured lines that are durably in the store.
        failed: lines that could not be captured.
        rows: number of captured rows.
        nbytes: size of the encoded rows in bytes.
        seconds: time since the executor started.
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
        """Number of finished lines."""
        return self.skipped + self.captured + self.failed


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a job.

    Attributes:
        out: directory or URL of the store.
        counts: final counts.
        errors: path of the list of failed lines; None: no line failed, or there is no list.
        interrupted: whether the job ended before all lines were processed.
    """

    out: str
    counts: Counts
    errors: str | None
    interrupted: bool

    @property
    def status(self) -> int:
        """Exit status: 0 if all lines are in the store, 1 if some are not."""
        return int(self.interrupted or self.counts.failed > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "out": self.out,
            "status": self.status,
            **asdict(self.counts),
            "errors": self.errors,
            "interrupted": self.interrupted,
        }


class Watch(Protocol):
    """Callbacks for a job's progress, called in the thread that runs the job."""

    def moved(self, counts: Counts) -> None:
        """Handle new counts."""
        ...

    def failed(self, failed: Failed) -> None:
        """Handle a line that could not be captured."""
        ...


class _Silent:
    def moved(self, counts: Counts) -> None:
        return

    def failed(self, failed: Failed) -> None:
        return


class CaptureRun:
    """Run of one job, with its data and store opened. A context manager that unlocks the store.

    Attributes:
        job: the job.
        counts: progress.
        has_begun: whether the engine has started.
        check: what the first lines are; None: they were not read.
        engines: description of the engines, for messages.
    """

    engines = "vLLM"

    def __init__(self, job: Job) -> None:
        """Check everything that can be checked without an engine, and lock the store.

        Raises:
            SpecError: the data does not exist or lacks the prompt column.
            StoreError: the store is not empty, contains other data or other terms, or is in use by
                another job.
            UnsupportedError: a library that reads the data is not installed.
        """
        self.counts = Counts()
        self.has_begun = False
        self.job = job
        self._identity = Identity(job)
        # Unfinished prompts that the executor has received.
        self._running: dict[int, Record] = {}
        # All data was read.
        self._at_end = False
        self._source, self.check = open_prompts(job)
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
        """Number of lines that were in the store when the job began."""
        return len(self._done)

    @property
    def summary(self) -> Summary:
        """Result so far."""
        errors = self._failures.path if self._failures.count else None
        is_whole = self._at_end and not self._running
        return Summary(self.job.out, self.counts, errors, interrupted=not is_whole)

    def work(
        self,
        start: Callable[[Job], Engine] = start_vllm,
        watch: Watch | None = None,
        stop: threading.Event | None = None,
    ) -> Summary:
        """Capture until the data ends. However the run ends, finished lines are in the store.

        Args:
            start: starts the engine.
            watch: receives progress.
            stop: event that ends the run early.

        Raises:
            StoreError: rows cannot be written, or the store contains other data.
            Exception: any exception of an engine that cannot start or breaks.
        """
        return self.work_on(lambda job: LocalExecutor(job, start(job)), watch, stop)

    def work_on(
        self,
        executor: Callable[[Job], Executor],
        watch: Watch | None = None,
        stop: threading.Event | None = None,
    ) -> Summary:
        """Capture as in `work`, with any executor.

        Args:
            executor: creates the executor; returns when it is ready.
            watch, stop: see `work`.
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
            # Control-C on a terminal also stops the engine's processes, which then raises here.
            if not self._stop.is_set():
                raise
        finally:
            try:
                self._record(self._executor.close())
            finally:
                self.counts.stored = self._executor.stored
                self.counts.seconds = time.monotonic() - began
        self._notify()
        return self.summary

    def _run(self, began: float) -> None:
        records = self._missing()
        while self._fill(records):
            self._record(self._executor.step())
            self.counts.seconds = time.monotonic() - began
            self._notify()

    def _fill(self, records: Iterator[Record]) -> bool:
        """Add prompts up to the executor's window; return False if there is nothing left to do."""
        while len(self._running) < self._executor.window and not self._stop.is_set():
            record = next(records, None)
            if record is None:
                break
            try:
                self._executor.add(self._identity.id(record), record)
            except SpecError as error:
                self._fail(_failure_of(record, str(error)))
            else:
                self._running[record.line] = record
        return bool(self._running) and not self._stop.is_set()

    def _missing(self) -> Iterator[Record]:
        """Yield the prompts that are not in the store."""
        for record in self._source:
            if isinstance(record, Failed):
                self._fail(record)
            elif not self._done.has(record):
                yield record
            else:
                self.counts.skipped += 1
                self._notify()
            if self._stop.is_set():
                return
        self._at_end = True

    def _record(self, finished: Sequence[CapturedLine | Failed]) -> None:
        for outcome in finished:
            record = self._running.pop(outcome.line)
            if isinstance(outcome, Failed):
                self._fail(_failure_of(record, outcome.reason))
            else:
                self.counts.captured += 1
                self.counts.rows += outcome.rows
                self.counts.nbytes += outcome.nbytes

    def _fail(self, failed: Failed) -> None:
        self.counts.failed += 1
        self._failures.add(failed)
        self._watch.failed(failed)
        self._notify()

    def _notify(self) -> None:
        self.counts.stored = self._executor.stored
        self._watch.moved(self.counts)


def _failure_of(record: Record, reason: str) -> Failed:
    """Return the failure of a prompt; of a packed one, with the lines that are in it."""
    documents = record.prompt.parts.documents if isinstance(record.prompt, PromptTokens) else ()
    if not documents:
        return Failed(record.line, reason)
    first, last = documents[0].line, documents[-1].line
    return Failed(first, f"packed prompt {record.line}, of lines {first} to {last}: {reason}")


def capture_dataset(
    job: Job,
    start: Callable[[Job], Engine] = start_vllm,
    watch: Watch | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Capture a dataset.

    Args:
        job: the job.
        start, watch, stop: see `CaptureRun.work`.

    Raises:
        SpecError, StoreError, UnsupportedError, Exception: see `CaptureRun` and `CaptureRun.work`.
    """
    with CaptureRun(job) as run:
        return run.work(start, watch, stop)
