"""One engine whose rows go back to whoever asked: what is a step of Ray Data's own pipelines."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from midstream.errors import SpecError
from midstream.jobs.engine import Engine, Reply
from midstream.jobs.job import Job
from midstream.jobs.records import Failed, Prompt, Record
from midstream.sinks.base import Origin

_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """Prompts that came together.

    Attributes:
        first: the number of the first of them.
        told: gets what came of each.
        ended: by number, as far as they have.
        left: how many have not.
    """

    first: int
    told: Future[list[Reply | Failed]]
    left: int
    ended: dict[int, Reply | Failed] = field(default_factory=dict)


class EngineThread:
    """Runs an engine in a thread, with the prompts of all calls together in it."""

    def __init__(self, job: Job, start: Callable[[Job], Engine]) -> None:
        """Returns when the engine has started; raises what it raised.

        Args:
            job: what is captured; its data and store are not looked at.
            start: makes the engine, in the thread that steps it.
        """
        self._job, self._start = job, start
        self._numbers = itertools.count(1)
        self._queue: deque[tuple[_Call, Record]] = deque()
        self._calls: dict[int, _Call] = {}  # of each prompt that has not ended, by its number
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        ready: Future[Origin] = Future()
        thread = threading.Thread(
            target=self._run, args=(ready,), name="midstream engine", daemon=True
        )
        thread.start()
        self.origin = ready.result()

    def submit(self, prompts: Sequence[Prompt | Failed]) -> Future[list[Reply | Failed]]:
        """Captures prompts; what came of each, in order. What has failed already is given back."""
        told: Future[list[Reply | Failed]] = Future()
        told.set_running_or_notify_cancel()  # nobody can cancel it from here on
        with self._changed:
            if self._error is not None:
                told.set_exception(self._error)
                return told
            numbers = [next(self._numbers) for _ in prompts]
            call = _Call(numbers[0] if numbers else 0, told, len(prompts))
            for number, prompt in zip(numbers, prompts, strict=True):
                if isinstance(prompt, Failed):
                    call.ended[number] = prompt
                    call.left -= 1
                else:
                    self._calls[number] = call
                    self._queue.append((call, Record(number, prompt)))
            self._changed.notify()
        self._tell(call)
        return told

    def _run(self, ready: Future[Origin]) -> None:
        try:
            self._engine = self._start(self._job)
            ready.set_result(self._engine.origin)
        except BaseException as error:
            _LOGGER.debug("an engine did not start", exc_info=True)
            ready.set_exception(error)
            return
        try:
            running = 0
            while True:
                running += self._fill(running)
                for reply in self._engine.step() if running else ():
                    running -= 1
                    self._end(reply.line, reply)
        except BaseException as error:
            _LOGGER.debug("an engine broke", exc_info=True)
            with self._changed:
                self._error = error
                calls = {id(call): call for call in self._calls.values()}
                self._calls.clear()
            for call in calls.values():
                call.told.set_exception(error)

    def _fill(self, running: int) -> int:
        """Hands the engine prompts, and waits for some where it has none; how many it took."""
        with self._changed:
            while not running and not self._queue:
                self._changed.wait()
            room = max(0, self._engine.window - running)
            taken = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
        count = 0
        for _, record in taken:
            try:
                self._engine.add(record)
                count += 1
            except SpecError as error:
                self._end(record.line, Failed(record.line, str(error)))
        return count

    def _end(self, number: int, what: Reply | Failed) -> None:
        with self._changed:
            call = self._calls.pop(number)
        call.ended[number] = what
        call.left -= 1
        self._tell(call)

    def _tell(self, call: _Call) -> None:
        if not call.left and not call.told.done():
            call.told.set_result([call.ended[number] for number in sorted(call.ended)])
