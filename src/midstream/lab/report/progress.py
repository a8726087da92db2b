"""Progress of a report: one bar over all stages, or plain lines if there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages:
    """Progress over all stages: `with stages("words"): …` is one; `advance` moves within it."""

    def __init__(self, console: Console, num_stages: int) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_stages)
        self._words = ""
        self._num_done = 0

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @contextmanager
    def __call__(self, words: str) -> Iterator[None]:
        """Run the block as one stage; afterwards, its line stays on screen with its duration."""
        self._words, start = words, time.perf_counter()
        self._progress.update(self._task, description=words)
        yield
        self._num_done += 1
        self._progress.update(self._task, completed=self._num_done)
        took = time.perf_counter() - start
        self._console.print(f"{took:7.1f} s  {words}", markup=False, highlight=False)

    def advance(self, words: str, done: float) -> None:
        """Show the current work within a stage, and the fraction of the stage that is done."""
        self._progress.update(
            self._task, description=f"{self._words}: {words}", completed=self._num_done + done
        )
