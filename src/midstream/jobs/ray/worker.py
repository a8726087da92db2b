"""One engine at work on chunks of a job: its own thread, its own writer into the store.

Lines of all the chunks that it has run together, so that the engine is full from one chunk to the
next. A chunk has ended when each of its lines is in the store or has failed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from midstream.errors import EngineError, MidstreamError, SpecError
from midstream.jobs.engine import Engine, Reply
from midstream.jobs.job import Job
from midstream.jobs.local_executor import Captured
from midstream.jobs.ray.chunk_coordinator import CAREFUL
from midstream.jobs.ray.chunks import ChunkAttempt, Outcome
from midstream.jobs.records import Failed, Record
from midstream.jobs.store_writer import StoreWriter
from midstream.store import open_store

_LOGGER = logging.getLogger(__name__)
_BETWEEN_LOOKS = 0.01  # seconds, while nothing is to be done but to wait for a shard


@dataclass(slots=True)
class _Chunk:
    """A chunk that is under way.

    Attributes:
        number: its number.
        turn: how it came.
        told: gets what became of it.
        open: lines that the engine has not answered, those that it has not got among them.
        put: of a line that was handed to the store, the how manieth it was, from 1.
        captured: those lines, and those that were in the store before.
        failed: other lines.
    """

    number: int
    turn: ChunkAttempt
    told: Future[Outcome]
    open: set[int]
    put: dict[int, int] = field(default_factory=dict)
    captured: dict[int, Captured] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)

    def outcome(self, stored: int, error: MidstreamError | None = None) -> Outcome:
        """What became of it, where so many of what the keeper was given is in the store."""
        kept = (each for line, each in self.captured.items() if self.put.get(line, 0) <= stored)
        return Outcome(self.number, tuple(kept), tuple(self.failed), error)

    def is_over(self, stored: int) -> bool:
        """Whether nothing of it is missing."""
        return not self.open and max(self.put.values(), default=0) <= stored


class Worker:
    """Runs an engine in a thread. What breaks the engine, `broke` is told in that thread, after
    what had come was written; an exception of midstream's own ends the job instead.
    """

    def __init__(
        self,
        job: Job,
        start: Callable[[Job], Engine],
        alone: Callable[[int, int | None], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        """Args:
        job: what is captured.
        start: makes the engine, in the thread that steps it.
        alone: is told of a line of a chunk that will be run alone, and that it was.
        broke: is told what the engine raised.
        """
        self._job, self._start, self._alone, self._broke = job, start, alone, broke
        self._chunks: dict[int, _Chunk] = {}
        self._known: set[int] = set()  # of them those that the thread has seen
        self._queue: deque[tuple[_Chunk, str, Record]] = deque()
        self._careful: deque[_Chunk] = deque()
        self._running: dict[int, tuple[_Chunk, str]] = {}  # by line
        self._puts = 0
        self._halted = False
        self._error: MidstreamError | None = None
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        threading.Thread(target=self._run, name="midstream engine", daemon=True).start()

    def wait(self) -> None:
        """Returns when the engine has started; raises what it raised."""
        self._ready.result()

    def submit(self, number: int, turn: ChunkAttempt) -> Future[Outcome]:
        """Takes a chunk. One that it has already is not run twice."""
        with self._changed:
            known = self._chunks.get(number)
            if known is not None:
                return known.told
            told: Future[Outcome] = Future()
            told.set_running_or_notify_cancel()  # nobody can cancel it from here on
            chunk = _Chunk(number, turn, told, {record.line for _, record in turn.lines})
            if self._error is not None or self._halted:
                told.set_result(chunk.outcome(0, self._error))
                return told
            self._chunks[number] = chunk
            self._changed.notify()
        return told

    def halt(self) -> None:
        """Gives back all chunks as they are, when what came is in the store."""
        with self._changed:
            self._halted = True
            self._changed.notify()

    # ------------------------------------------------------------ the thread's

    def _run(self) -> None:
        try:
            self._engine = self._start(self._job)
            self._keeper = StoreWriter(self._job, self._engine.origin)
        except BaseException as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        broken: BaseException | None = None
        try:
            while self._take_in():
                self._work()
        except BaseException as error:
            _LOGGER.debug("an engine broke", exc_info=True)
            broken = error
        try:
            self._keeper.close()
        except BaseException as error:
            _LOGGER.debug("rows could not be written", exc_info=True)
            # Of two, that which tells the job that it cannot go on.
            if broken is None or isinstance(error, MidstreamError):
                broken = error
        if broken is not None and not isinstance(broken, MidstreamError) and not self._halted:
            self._broke(broken)
        self._give_back(broken)

    def _give_back(self, broken: BaseException | None) -> None:
        """Ends all chunks as they are."""
        if isinstance(broken, MidstreamError):
            self._error = broken
        elif broken is not None and not self._halted:
            self._error = EngineError(f"{type(broken).__name__}: {broken}")
        with self._changed:
            self._halted = True
            left, self._chunks = list(self._chunks.values()), {}
        for chunk in left:
            chunk.told.set_result(chunk.outcome(self._keeper.stored, self._error))

    def _take_in(self) -> bool:
        """Reads what has come; waits for it where there is nothing else. False: it is halted."""
        with self._changed:
            while not self._halted and not self._chunks:
                self._changed.wait()
            if self._halted:
                return False
            new = [each for each in self._chunks.values() if each.number not in self._known]
            self._known = set(self._chunks)
        for chunk in sorted(new, key=lambda each: each.number):
            self._lay_out(chunk)
        return True

    def _lay_out(self, chunk: _Chunk) -> None:
        """Sorts out what of a chunk has to be run."""
        turn = chunk.turn
        there: dict[str, int] = {}
        if turn.attempt > 1:
            wanted = {request for request, _ in turn.lines}
            there = {
                each.request: sum(each.activations().counts().values())
                for each in open_store(self._job.out, turn.since).requests
                if each.request in wanted
            }
        for request, record in turn.lines:
            if request in there:
                rows = there[request]
                nbytes = rows * self._keeper.row_bytes
                chunk.captured[record.line] = Captured(record.line, rows, nbytes)
                chunk.open.remove(record.line)
            elif record.line in turn.given_up:
                self._fail(chunk, Failed(record.line, turn.given_up[record.line]))
            elif turn.attempt < CAREFUL:
                self._queue.append((chunk, request, record))
        if turn.attempt >= CAREFUL:
            self._careful.append(chunk)

    def _work(self) -> None:
        """One step of the engine, or of waiting."""
        if self._careful and not self._running:
            self._run_carefully(self._careful.popleft())
        elif not self._careful:
            # What came first fills the engine; but it runs empty for those that are run alone.
            while self._queue and len(self._running) < self._engine.window:
                self._add(*self._queue.popleft())
        if self._running:
            self._step()
        is_starved = not self._queue and len(self._running) < self._engine.window
        # Others come when one is over: there may be one that waits for nothing but its shard.
        self._settle(is_starved and any(not each.open for each in self._chunks.values()))

    def _run_carefully(self, chunk: _Chunk) -> None:
        for request, record in chunk.turn.lines:
            if record.line not in chunk.open or self._halted:
                continue
            self._alone(chunk.number, record.line)
            self._add(chunk, request, record)
            while self._running and not self._halted:
                self._step()
            # In the store before the next one may end the engine.
            while chunk.put.get(record.line, 0) > self._keeper.stored:
                self._settle(drain=True)
        if not self._halted:
            self._alone(chunk.number, None)

    def _add(self, chunk: _Chunk, request: str, record: Record) -> None:
        try:
            self._engine.add(record)
        except SpecError as error:
            self._fail(chunk, Failed(record.line, str(error)))
        else:
            self._running[record.line] = (chunk, request)

    def _step(self) -> None:
        for reply in self._engine.step():
            chunk, request = self._running.pop(reply.line)
            if isinstance(reply, Reply):
                rows, nbytes = self._keeper.put(request, reply)
                self._puts += 1
                chunk.put[reply.line] = self._puts
                chunk.captured[reply.line] = Captured(reply.line, rows, nbytes)
                chunk.open.remove(reply.line)
            else:
                self._fail(chunk, reply)

    def _fail(self, chunk: _Chunk, failed: Failed) -> None:
        chunk.failed.append(failed)
        chunk.open.remove(failed.line)

    def _settle(self, drain: bool) -> None:
        """Ends the chunks that are over.

        Args:
            drain: whether what came is written now. Otherwise it waits for more, as shards are
                better large than many.
        """
        self._keeper.check()
        stored = self._keeper.stored
        for chunk in [each for each in self._chunks.values() if each.is_over(stored)]:
            with self._changed:
                del self._chunks[chunk.number]
            chunk.told.set_result(chunk.outcome(stored))
        if drain and stored < self._puts:
            self._keeper.drain()
            if not self._running:
                with self._changed:
                    self._changed.wait(_BETWEEN_LOOKS)
