"""Samples of the stack of a process's main thread, at equal intervals of time.

A signal takes each sample, between two steps of Python's interpreter. So a long call of C code is
counted at the line that makes it, with the time that it waits. `cProfile` adds time to each call,
and overstates code that makes many small ones.
"""

from __future__ import annotations

import collections
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL = 0.001


class StackSamples:
    """Counter of the stacks of the main thread, which must start and stop it."""

    def __init__(self) -> None:
        self._found: collections.Counter[tuple[tuple[Any, int], ...]] = collections.Counter()
        self._began = self._cpu = 0.0

    def start(self) -> None:
        """Begin to sample."""
        signal.signal(signal.SIGALRM, self._sample)
        self._began, self._cpu = time.perf_counter(), time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)

    def stop(self, file: Path) -> None:
        """Stop, and write the stacks as lines "outermost;…;innermost COUNT", as flame graph tools
        read them, after a comment with the seconds that passed and those of this thread's CPU time.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        passed, cpu = time.perf_counter() - self._began, time.thread_time() - self._cpu
        lines = [f"# {passed:.3f} s passed, {cpu:.3f} s of CPU time"]
        for stack, count in self._found.most_common():
            lines.append(f"{';'.join(_name(*place) for place in reversed(stack))} {count}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")

    def _sample(self, number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self._found[tuple(stack)] += 1


def _name(code: Any, line: int) -> str:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_name}:{line}"
