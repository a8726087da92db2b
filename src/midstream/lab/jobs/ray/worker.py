"""Worker that captures chunks with one engine, in its own thread and with its own store writer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from midstream.errors import EngineError, MidstreamError
from midstream.lab.jobs.engine import Engine, Reply
from midstream.lab.jobs.engine_loop import EngineLoop
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.local_executor import CapturedLine
from midstream.lab.jobs.ray.chunk_coordinator import CAREFUL
from midstream.lab.jobs.ray.chunks import ChunkAttempt, Outcome
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.store_writer import StoreWriter
from midstream.sites import Tap
from midstream.store import open_store

_LOGGER = logging.getLogger(__name__)
# Seconds between checks while waiting for a shard to be written.
_POLL_SECONDS = 0.01


@dataclass(slots=True)
class _Chunk:
    """An unfinished chunk."""

    number: int
    attempt: ChunkAttempt
    result: Future[Outcome]
    open: set[int]  # lines that the engine has not finished, or not yet got
    put: dict[int, int] = field(default_factory=dict)  # line: its place in the delivery, from 1
    captured: dict[int, CapturedLine] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)

    def outcome(self, stored: int, error: MidstreamError | None = None) -> Outcome:
        """Return the outcome if the first `stored` lines of the store writer are in the store."""
        kept = (
            captured for line, captured in self.captured.items() if self.put.get(line, 0) <= stored
        )
        return Outcome(self.number, tuple(kept), tuple(self.failed), error)

    def is_finished(self, stored: int) -> bool:
        """Return whether all lines are in the store or failed; see `outcome` for `stored`."""
        return not self.open and max(self.put.values(), default=0) <= stored


class Worker:
    """Runs an engine in a thread, and the lines of all its chunks together."""

    def __init__(
        self,
        job: Job,
        start: Callable[[Job], Engine],
        on_alone: Callable[[int, int | None], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start the thread and the engine in it.

        `on_alone` is called with a chunk's number and the line that is run alone next, and with
        None after the last one; `on_broken` with the engine's exception, after the captured rows
        were written. An exception of midstream ends the job instead.
        """
        self._job, self._start = job, start
        self._on_alone, self._on_broken = on_alone, on_broken
        self._chunks: dict[int, _Chunk] = {}
        # Numbers of the chunks that the thread has received.
        self._known: set[int] = set()
        self._queue: deque[tuple[tuple[_Chunk, str], Record]] = deque()
        # Chunks whose lines are run one at a time.
        self._careful: deque[_Chunk] = deque()
        # Number of lines delivered to the store writer.
        self._puts = 0
        self._halted = False
        self._error: MidstreamError | None = None
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        threading.Thread(target=self._run, name="midstream engine", daemon=True).start()

    def wait(self) -> None:
        self._ready.result()

    def submit(self, number: int, attempt: ChunkAttempt) -> Future[Outcome]:
        """Capture a chunk. An unfinished chunk of the same number is not run twice."""
        with self._changed:
            known = self._chunks.get(number)
            if known is not None:
                return known.result
            result: Future[Outcome] = Future()
            result.set_running_or_notify_cancel()  # makes it impossible to cancel
            chunk = _Chunk(number, attempt, result, {record.line for _, record in attempt.lines})
            if self._error is not None or self._halted:
                result.set_result(chunk.outcome(0, self._error))
                return result
            self._chunks[number] = chunk
            self._changed.notify()
        return result

    def halt(self) -> None:
        """Write the captured rows and return all chunks unfinished."""
        with self._changed:
            self._halted = True
            self._changed.notify()

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            engine = self._start(self._job)
            self._loop: EngineLoop[tuple[_Chunk, str]] = EngineLoop(engine)
            self._writer = StoreWriter(self._job, engine.origin)
        except BaseException as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        broken: BaseException | None = None
        try:
            while self._receive():
                self._work()
        except BaseException as error:
            _LOGGER.debug("an engine broke", exc_info=True)
            broken = error
        try:
            self._writer.close()
        except BaseException as error:
            _LOGGER.debug("rows could not be written", exc_info=True)
            # Of two errors, the one that ends the job takes precedence.
            if broken is None or isinstance(error, MidstreamError):
                broken = error
        if broken is not None and not isinstance(broken, MidstreamError) and not self._halted:
            self._on_broken(broken)
        self._return_chunks(broken)

    def _return_chunks(self, broken: BaseException | None) -> None:
        if isinstance(broken, MidstreamError):
            self._error = broken
        elif broken is not None and not self._halted:
            self._error = EngineError(f"{type(broken).__name__}: {broken}")
        with self._changed:
            self._halted = True
            unfinished, self._chunks = list(self._chunks.values()), {}
        for chunk in unfinished:
            chunk.result.set_result(chunk.outcome(self._writer.stored, self._error))

    def _receive(self) -> bool:
        """Queue new chunks, waiting for one if there are none; return False if halted."""
        with self._changed:
            while not self._halted and not self._chunks:
                self._changed.wait()
            if self._halted:
                return False
            new = [chunk for chunk in self._chunks.values() if chunk.number not in self._known]
            self._known = set(self._chunks)
        for chunk in sorted(new, key=lambda chunk: chunk.number):
            self._enqueue(chunk)
        return True

    def _enqueue(self, chunk: _Chunk) -> None:
        """Queue the lines of a chunk, except those already stored or given up."""
        attempt = chunk.attempt
        stored: dict[str, dict[Tap, int]] = {}  # numbers of rows
        if attempt.number > 1:
            wanted = {request for request, _ in attempt.lines}
            stored = {
                stored_request.request: stored_request.activations().counts()
                for stored_request in open_store(self._job.out, attempt.since).requests
                if stored_request.request in wanted
            }
        for request, record in attempt.lines:
            if request in stored:
                rows = sum(stored[request].values())
                nbytes = self._writer.nbytes(stored[request])
                chunk.captured[record.line] = CapturedLine(record.line, rows, nbytes)
                chunk.open.remove(record.line)
            elif record.line in attempt.given_up:
                self._fail(chunk, Failed(record.line, attempt.given_up[record.line]))
            elif attempt.number < CAREFUL:
                self._queue.append(((chunk, request), record))
        if attempt.number >= CAREFUL:
            self._careful.append(chunk)

    def _work(self) -> None:
        """Run one step of the engine, or wait once."""
        if self._careful and not self._loop:
            self._run_carefully(self._careful.popleft())
        elif not self._careful:
            # Queued lines are held back while a careful chunk waits for the engine to be empty.
            for (chunk, _), failed in self._loop.fill(self._queue):
                self._fail(chunk, failed)
        self._step()
        is_starved = not self._queue and self._loop.capacity > 0
        # New chunks arrive when one is finished, and one may be waiting for its shard only.
        self._finish_chunks(is_starved and any(not chunk.open for chunk in self._chunks.values()))

    def _run_carefully(self, chunk: _Chunk) -> None:
        for request, record in chunk.attempt.lines:
            if record.line not in chunk.open or self._halted:
                continue
            self._on_alone(chunk.number, record.line)
            for _, failed in self._loop.fill(deque([((chunk, request), record)])):
                self._fail(chunk, failed)
            while self._loop and not self._halted:
                self._step()
            # Wait until it is stored, because the next line may end the engine.
            while chunk.put.get(record.line, 0) > self._writer.stored:
                self._finish_chunks(drain=True)
        if not self._halted:
            self._on_alone(chunk.number, None)

    def _step(self) -> None:
        for (chunk, request), reply in self._loop.step():
            if isinstance(reply, Reply):
                rows, nbytes = self._writer.put(request, reply)
                self._puts += 1
                chunk.put[reply.line] = self._puts
                chunk.captured[reply.line] = CapturedLine(reply.line, rows, nbytes)
                chunk.open.remove(reply.line)
            else:
                self._fail(chunk, reply)

    def _fail(self, chunk: _Chunk, failed: Failed) -> None:
        chunk.failed.append(failed)
        chunk.open.remove(failed.line)

    def _finish_chunks(self, drain: bool) -> None:
        """Resolve finished chunks; with `drain`, write rows now instead of in a larger shard."""
        self._writer.check()
        stored = self._writer.stored
        for chunk in [chunk for chunk in self._chunks.values() if chunk.is_finished(stored)]:
            with self._changed:
                del self._chunks[chunk.number]
            chunk.result.set_result(chunk.outcome(stored))
        if drain and stored < self._puts:
            self._writer.drain()
            if not self._loop:
                with self._changed:
                    self._changed.wait(_POLL_SECONDS)
