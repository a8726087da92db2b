"""Forked processes of scripts/models_survey.py: some at once, each with a time limit."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = dict[str, Any]


@dataclass
class _Running(Generic[Item]):
    """A process at work; `reading` is its pipe."""

    item: Item
    child: int
    reading: int
    started: float = field(default_factory=time.monotonic)
    parts: list[bytes] = field(default_factory=list)


def run_each(
    items: Sequence[Item],
    work: Callable[[Item], Result],
    limit: float,
    jobs: int,
    room: Callable[[Item, Sequence[Item]], bool] = lambda item, running: True,
) -> Iterator[tuple[Item, Result, float]]:
    """Yield (item, result, seconds) as processes end; the result has "outcome" and "reason".

    Args:
        work: runs in a process of its own.
        limit: seconds after which a process is killed.
        jobs: number of processes at once.
        room: whether an item may start beside those at work.
    """
    waiting = list(items)
    running: dict[int, _Running[Item]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            beside = [process.item for process in running.values()]
            fitting = (place for place, item in enumerate(waiting) if room(item, beside))
            place = next(fitting, None if running else 0)
            if place is None:
                break
            begun = _begin(waiting.pop(place), work, list(running))
            running[begun.reading] = begun
        now = time.monotonic()
        left = min(process.started + limit for process in running.values()) - now
        ready = select.select(list(running), [], [], max(0.0, left))[0]
        for reading in ready:
            process = running[reading]
            part = os.read(reading, 1 << 16)
            if part:
                process.parts.append(part)
                continue
            yield process.item, _end(process), time.monotonic() - process.started
            del running[reading]
        for process in list(running.values()):
            if time.monotonic() - process.started > limit:
                os.killpg(process.child, signal.SIGKILL)
                _end(process)
                reason = f"no answer within {limit:.0f} s"
                yield process.item, {"outcome": "cannot be built", "reason": reason}, limit
                del running[process.reading]


def _begin(item: Item, work: Callable[[Item], Result], others: Sequence[int]) -> _Running[Item]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for descriptor in (reading, *others):
            os.close(descriptor)
        _in_child(item, work, writing)
    os.close(writing)
    return _Running(item, child, reading)


def _in_child(item: Item, work: Callable[[Item], Result], writing: int) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    try:
        text = json.dumps(work(item))
    except BaseException:  # noqa: BLE001
        # The doctor itself failed: a bug in midstream, not a finding about the model.
        text = json.dumps({"outcome": "wrong", "reason": traceback.format_exc(limit=-3)})
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        pipe.write(text)
    os._exit(0)


def _end(process: _Running[Item]) -> Result:
    """Wait for a process whose pipe is closed, or that was killed; return what it wrote."""
    os.close(process.reading)
    _, status = os.waitpid(process.child, 0)
    if process.parts:
        result: Result = json.loads(b"".join(process.parts))
        return result
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    name = signal.Signals(number).name if number else f"exit status {os.WEXITSTATUS(status)}"
    return {"outcome": "cannot be built", "reason": f"vLLM's process was killed by {name}"}
