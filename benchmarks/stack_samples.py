"""Where the time of a step goes: samples of the stack of a process's main thread, at equal
intervals of time, how long the device's stream runs in each step, and which kernels run on it.

A signal takes each sample, between two steps of Python's interpreter. So a long call of C code is
counted at the line that makes it, with the time that it waits. `cProfile` adds time to each call,
and overstates code that makes many small ones.
"""

from __future__ import annotations

import collections
import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

    def stop(self, file: Path, note: str = "") -> None:
        """Stop, and write the stacks as lines "outermost;…;innermost COUNT", as flame graph tools
        read them, after a comment with the seconds that passed, those of this thread's CPU time,
        and a note.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        passed, cpu = time.perf_counter() - self._began, time.thread_time() - self._cpu
        lines = [f"# {passed:.3f} s passed, {cpu:.3f} s of CPU time{note}"]
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


class StreamTimes:
    """When the stream of a CUDA device begins and ends each step of a model runner. What is between
    two steps, it waits for the host.
    """

    def __init__(self) -> None:
        self._steps: list[list[Any]] = []  # first and last event of each

    @contextmanager
    def of(self, runner: Any) -> Iterator[None]:
        """Take the times of a runner's steps in this block."""
        import torch

        names = "execute_model", "sample_tokens"
        originals = {name: getattr(runner, name) for name in names}
        own = {name: vars(runner).get(name) for name in names}

        def timed(name: str) -> Any:
            def run(*args: Any, **named: Any) -> Any:
                if name == "execute_model":
                    self._steps.append([_recorded(torch)])
                out = originals[name](*args, **named)
                self._steps[-1][1:] = [_recorded(torch)]
                return out

            return run

        for name in names:
            setattr(runner, name, timed(name))
        try:
            yield
        finally:
            for name, method in own.items():
                delattr(runner, name) if method is None else setattr(runner, name, method)

    def show(self) -> str:
        """Return the milliseconds of the median step, as text. Call when the device is idle."""
        pairs = list(itertools.pairwise(self._steps))
        runs = sorted(step[0].elapsed_time(step[1]) for step, _ in pairs)
        waits = sorted(step[1].elapsed_time(later[0]) for step, later in pairs)
        if not pairs:
            return ""
        run, wait = runs[len(pairs) // 2], waits[len(pairs) // 2]
        return f"; a step: {run:.3f} ms on the device, which then waits {wait:.3f} ms"


class DeviceKernels:
    """Recorder of a CUDA device's kernels and copies, those of CUDA graphs too, and of the calls of
    CUDA's own functions that queue them. Nothing without a device.
    """

    def __init__(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CUDA]
        recorded = torch.cuda.is_available()
        self._profile = torch.profiler.profile(activities=activities) if recorded else None

    def start(self) -> None:
        """Begin to record."""
        if self._profile is not None:
            self._profile.start()

    def stop(self, file: Path) -> None:
        """Stop, and write a line "MICROSECONDS COUNT NAME" for each, the longest first."""
        lines = []
        if self._profile is not None:
            self._profile.stop()
            totals: collections.Counter[str] = collections.Counter()
            counts: collections.Counter[str] = collections.Counter()
            for event in self._profile.events():
                totals[event.name] += event.time_range.elapsed_us()
                counts[event.name] += 1
            lines = [f"{time:.0f} {counts[name]} {name}" for name, time in totals.most_common()]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


def _recorded(torch: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _name(code: Any, line: int) -> str:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_name}:{line}"
