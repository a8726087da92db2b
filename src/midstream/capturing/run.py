"""A dataset capture: prompts are read as the engine takes them, and rows written as they come."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from midstream.capturing.engine import Engine, Reply, start_vllm
from midstream.capturing.failures import Failures
from midstream.capturing.identity import Done, Identity
from midstream.capturing.job import Job
from midstream.capturing.keeping import Keeper
from midstream.capturing.place import errors_file, taken
from midstream.capturing.records import Failed, Record
from midstream.capturing.sources import open_source
from midstream.errors import ReceiptWarning, SpecError, StoreError


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


class Capturing:
    """One job: its data and its store are there. As a context, it gives the store back.

    Attributes:
        job: what to do.
        counts: how far it is.
        has_begun: whether the engine has started.
    """

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
        self._ids: dict[int, str] = {}  # of what the engine has
        self._at_end = False  # of the data
        self._source = open_source(job)
        with ExitStack() as stack:
            self._done = Done(job, stack.enter_context(taken(job)))
            if self._source.can_be_read_again:
                self._done.check(self._source)
            self._failures = Failures(errors_file(job))
            stack.callback(self._failures.close)
            self.counts.total = self._source.count()
            self._stack = stack.pop_all()

    def __enter__(self) -> Capturing:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def summary(self) -> Summary:
        """What it has done so far."""
        errors = self._failures.path if self._failures.count else None
        is_whole = self._at_end and not self._ids
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
        self._watch = watch or _Silent()
        self._stop = stop or threading.Event()
        self._engine = start(self.job)
        self._keeper = Keeper(self.job, self._engine.origin)
        self._failures.begin()
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
                self._keeper.close()
            finally:
                self.counts.stored = self._keeper.stored
                self.counts.seconds = time.monotonic() - began
        self._moved()
        return self.summary

    def _run(self, began: float) -> None:
        records = self._missing()
        # The job reads the receipts; warnings of them would say the same again.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReceiptWarning)
            while self._fill(records):
                for reply in self._engine.step():
                    self._take(reply)
                self._keeper.check()
                self.counts.seconds = time.monotonic() - began
                self._moved()

    def _fill(self, records: Iterator[Record]) -> bool:
        """Hands the engine as many prompts as it should have; False: there is nothing to do."""
        while len(self._ids) < self._engine.window and not self._stop.is_set():
            record = next(records, None)
            if record is None:
                break
            try:
                self._engine.add(record)
            except SpecError as error:
                self._fail(Failed(record.line, str(error)))
            else:
                self._ids[record.line] = self._identity.id(record)
        return bool(self._ids) and not self._stop.is_set()

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

    def _take(self, reply: Reply | Failed) -> None:
        request = self._ids.pop(reply.line)
        if isinstance(reply, Failed):
            self._fail(reply)
            return
        rows, nbytes = self._keeper.put(request, reply)
        self.counts.captured += 1
        self.counts.rows += rows
        self.counts.nbytes += nbytes

    def _fail(self, failed: Failed) -> None:
        self.counts.failed += 1
        self._failures.add(failed)
        self._watch.failed(failed)
        self._moved()

    def _moved(self) -> None:
        self.counts.stored = self._keeper.stored
        self._watch.moved(self.counts)


def capture_dataset(
    job: Job,
    start: Callable[[Job], Engine] = start_vllm,
    watch: Watch | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Captures a data set. Arguments and exceptions are those of `Capturing` and its `work`."""
    with Capturing(job) as capturing:
        return capturing.work(start, watch, stop)
