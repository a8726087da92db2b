"""Cancels the tasks of a scenario at each of their awaits, one run for each."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A task that has not ended by then never does; nothing is measured by it.
PATIENCE = 30.0


class Await(NamedTuple):
    """An await at which a task is cancelled."""

    task: int  # index of the task, in the order in which the scenario makes them
    nth: int  # index of the await, from 0, in the order in which the task comes to them
    # Whether what it awaits is done in the same turn of the loop, before the cancellation.
    late: bool


@dataclass
class Awaits:
    """The awaits of one run; one of them is cancelled."""

    cancels: Await | None = None  # the await that is cancelled; None: none is
    counts: list[int] = field(default_factory=list)  # number of awaits of each task, so far
    is_cancelled: bool = False  # whether that await came

    def make(self, loop: asyncio.AbstractEventLoop, work: Any, **given: Any) -> asyncio.Task[Any]:
        """Make a task whose awaits are counted; a task factory."""
        number = len(self.counts)
        self.counts.append(0)
        held: list[asyncio.Task[Any]] = []
        task = asyncio.Task(self._stepped(work, number, held), loop=loop, **given)
        held.append(task)
        # One that is cancelled before its first step has not begun its coroutine.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _stepped(self, work: Any, number: int, held: list[asyncio.Task[Any]]) -> Any:
        return await self._steps(work, number, held)

    @types.coroutine
    def _steps(self, work: Any, number: int, held: list[asyncio.Task[Any]]) -> Iterator[Any]:
        """Run a coroutine as `yield from` does, and look at each thing that it waits for."""
        error: BaseException | None = None
        while True:
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            nth, self.counts[number] = self.counts[number], self.counts[number] + 1
            if self.cancels is not None and self.cancels[:2] == (number, nth):
                self.is_cancelled = True
                self._cancel(held[0], awaited, self.cancels.late)
            try:
                yield awaited
            except BaseException as raised:  # noqa: BLE001 - the coroutine gets it
                error = raised

    def _cancel(self, task: asyncio.Task[Any], awaited: Any, late: bool) -> None:
        if late and awaited is not None:
            # Before the task's own callback, which resumes it in the same turn of the loop.
            awaited.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


@dataclass(frozen=True)
class Run:
    """What became of one run."""

    cancels: Await | None  # the await that was cancelled
    is_cancelled: bool  # whether it came
    ended: bool  # whether the scenario's task ended
    outcome: Any  # its result, or its exception
    left: tuple[str, ...]  # the tasks that had not ended when it had


def bounded(work: Coroutine[Any, Any, Any], patience: float = PATIENCE) -> Any:
    """Run a coroutine that must end; return its result.

    Not `asyncio.run`, which waits without limit for the tasks that it cancels at the end.
    """

    async def main() -> Any:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait((task,), timeout=patience)
        assert done, "it never ended"
        return task.result()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


Scenario = Callable[[], Coroutine[Any, Any, Any]]


def run(
    scenario: Scenario, cancels: Await | None, patience: float = PATIENCE
) -> tuple[Run, Awaits]:
    """Run a scenario, which is task 0, and cancel one await."""
    awaits = Awaits(cancels)

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        before = asyncio.all_tasks()
        loop.set_task_factory(awaits.make)
        task = loop.create_task(scenario())
        await asyncio.wait((task,), timeout=patience)
        loop.set_task_factory(None)
        outcome: Any = None
        if task.cancelled():
            outcome = asyncio.CancelledError()
        elif task.done():
            outcome = task.exception() or task.result()
        others = asyncio.all_tasks() - before - {task}
        if others:
            _, others = await asyncio.wait(others, timeout=patience)
        left = tuple(sorted(map(repr, others)))
        return Run(cancels, awaits.is_cancelled, task.done(), outcome, left)

    # Not `asyncio.run`, which waits without limit for tasks that it has cancelled.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main()), awaits
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def every_run(
    scenario: Scenario, *, only_root: bool = False, each_once: bool = False
) -> Iterator[Run]:
    """Run a scenario once for each await of each of its tasks, and cancel that; then once for each
    await again, cancelled after what it awaits is done, in the same turn of the loop.

    With `each_once` each await is cancelled in one of these two ways, in turn.
    """
    whole, awaits = run(scenario, None)
    assert whole.ended, "it does not end by itself"
    yield whole
    for number, count in enumerate(awaits.counts[:1] if only_root else awaits.counts):
        for nth in range(count):
            for late in (bool(nth % 2),) if each_once else (False, True):
                yield run(scenario, Await(number, nth, late))[0]
