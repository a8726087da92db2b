"""Engine in a thread that returns captured rows to its callers, for a step of Ray Data."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from midstream.lab.jobs.engine import Engine, Reply
from midstream.lab.jobs.engine_loop import EngineLoop
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.records import Failed, Prompt, Record
from midstream.sinks.base import Origin

_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """Prompts that were submitted together."""

    result: Future[list[Reply | Failed]]
    remaining: int  # number of unfinished prompts
    finished: dict[int, Reply | Failed] = field(default_factory=dict)


class EngineThread:
    """Runs an engine in a thread and batches the prompts of all calls."""

    def __init__(self, job: Job, start: Callable[[Job], Engine]) -> None:
        """Start the engine in the thread that steps it, and wait until it is ready."""
        self._job, self._start = job, start
        self._numbers = itertools.count(1)
        self._queue: deque[tuple[_Call, Record]] = deque()
        # Calls by the numbers of their unfinished prompts.
        self._calls: dict[int, _Call] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        ready: Future[Origin] = Future()
        thread = threading.Thread(
            target=self._run, args=(ready,), name="midstream engine", daemon=True
        )
        thread.start()
        self.origin = ready.result()

    def submit(self, prompts: Sequence[Prompt | Failed]) -> Future[list[Reply | Failed]]:
        """Capture prompts and return their results in order. A `Failed` is returned unchanged."""
        result: Future[list[Reply | Failed]] = Future()
        result.set_running_or_notify_cancel()  # makes it impossible to cancel
        with self._changed:
            if self._error is not None:
                result.set_exception(self._error)
                return result
            numbers = [next(self._numbers) for _ in prompts]
            call = _Call(result, len(prompts))
            for number, prompt in zip(numbers, prompts, strict=True):
                if isinstance(prompt, Failed):
                    call.finished[number] = prompt
                    call.remaining -= 1
                else:
                    self._calls[number] = call
                    self._queue.append((call, Record(number, prompt)))
            self._changed.notify()
        self._resolve(call)
        return result

    def _run(self, ready: Future[Origin]) -> None:
        try:
            engine = self._start(self._job)
            ready.set_result(engine.origin)
        except BaseException as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            ready.set_exception(error)
            return
        try:
            loop: EngineLoop[_Call] = EngineLoop(engine)
            while True:
                for _, failed in loop.fill(self._receive(loop)):
                    self._finish(failed.line, failed)
                for _, reply in loop.step():
                    self._finish(reply.line, reply)
        except BaseException as error:
            _LOGGER.debug("an engine broke", exc_info=True)
            with self._changed:
                self._error = error
                calls = {id(call): call for call in self._calls.values()}
                self._calls.clear()
            for call in calls.values():
                call.result.set_exception(error)

    def _receive(self, loop: EngineLoop[_Call]) -> deque[tuple[_Call, Record]]:
        """Return queued prompts up to the engine's capacity; wait for one if it is idle."""
        with self._changed:
            while not loop and not self._queue:
                self._changed.wait()
            count = min(loop.capacity, len(self._queue))
            return deque(self._queue.popleft() for _ in range(count))

    def _finish(self, number: int, reply: Reply | Failed) -> None:
        with self._changed:
            call = self._calls.pop(number)
        call.finished[number] = reply
        call.remaining -= 1
        self._resolve(call)

    def _resolve(self, call: _Call) -> None:
        if not call.remaining and not call.result.done():
            call.result.set_result([call.finished[number] for number in sorted(call.finished)])
