"""Calls of declared controllers within a time limit, in one thread of the engine core for each. A
call that takes longer has failed, and those behind it are postponed to the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from midstream.config.controllers import DeclaredController, load
from midstream.plan.control.control_laws import Observed

# Threads of a controller that have not returned. With so many, its calls fail at once.
MOST_HANGING = 8


@dataclass(slots=True, eq=False)
class ControllerCall:
    """One call of a controller. `error` says why it failed; `is_done`: it returned or raised."""

    decide: Callable[[Observed], Any]
    observed: Observed
    began: bool = False
    answer: Any = None
    error: str | None = None
    is_done: bool = False

    def make(self) -> None:
        self.began = True
        try:
            self.answer = self.decide(self.observed)
        except BaseException as error:  # noqa: BLE001 - the policy decides
            self.error = repr(error)
        self.is_done = True


class _Batch:
    def __init__(self, calls: Sequence[ControllerCall]) -> None:
        self.calls = calls
        self.finished = threading.Event()
        self.is_given_up = False


class _CallThread:
    """A thread that makes the calls of batches, until it is left alone."""

    def __init__(self, name: str) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=self._run, name=f"midstream controller {name}", daemon=True
        )
        self.thread.start()

    def put(self, batch: _Batch | None) -> None:
        self._batches.put(batch)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            for call in batch.calls:
                if batch.is_given_up:
                    break
                call.make()
            batch.finished.set()


class DeclaredCalls:
    """The calls of one declared controller."""

    def __init__(self, name: str, declared: DeclaredController) -> None:
        self.seconds = declared.seconds
        self._name = name
        self._make = load(name, declared)
        self._thread: _CallThread | None = None
        self._hanging: list[threading.Thread] = []

    def new(self) -> Callable[[Observed], Any]:
        """Return a controller for one request, which is made in its first call."""
        made: list[Callable[[Observed], Any]] = []

        def decide(observed: Observed) -> Any:
            if not made:
                made.append(self._make())
            return made[0](observed)

        return decide

    def begin(self, calls: Sequence[ControllerCall]) -> _Batch:
        """Begin calls. Pair it with `finish`."""
        batch = _Batch(calls)
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MOST_HANGING:
            for call in calls:
                call.error = f"it has not returned from {len(self._hanging)} earlier calls"
                call.began = call.is_done = True
            batch.finished.set()
            return batch
        if self._thread is None:
            self._thread = _CallThread(self._name)
        self._thread.put(batch)
        return batch

    def finish(self, batch: _Batch, deadline: float) -> list[ControllerCall]:
        """Wait for calls until a deadline; return those that began, each done or failed."""
        if not batch.finished.wait(max(0.0, deadline - time.monotonic())):
            batch.is_given_up = True
            assert self._thread is not None
            self._hanging.append(self._thread.thread)
            self._thread.put(None)
            self._thread = None
        calls = []
        for call in batch.calls:
            if call.is_done:
                calls.append(call)
            elif call.began:
                late = ControllerCall(call.decide, call.observed, began=True, is_done=True)
                late.error = f"it took more than {self.seconds:g} seconds"
                calls.append(late)
        return calls


def load_all(declared: Mapping[str, DeclaredController]) -> dict[str, DeclaredCalls]:
    return {name: DeclaredCalls(name, controller) for name, controller in declared.items()}


def make_calls(calls: Sequence[tuple[DeclaredCalls, list[ControllerCall]]]) -> list[ControllerCall]:
    """Make calls of several controllers at once, within the longest limit; return those made."""
    begun = time.monotonic()
    batches = [(controller, controller.begin(mine)) for controller, mine in calls]
    return [
        call
        for controller, batch in batches
        for call in controller.finish(batch, begun + controller.seconds)
    ]
