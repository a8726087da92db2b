"""Progress display of a job: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from midstream.console import visible
from midstream.lab.jobs.records import Failed
from midstream.lab.jobs.run import Counts, Summary

_MOST_FAILURES = 20
_LONGEST_REASON = 300
_BETWEEN_LINES = 10.0  # seconds
_RATE_SECONDS = 20.0  # of which the speed is the average


class Display:
    """A `Watch` that prints progress and failures."""

    def __init__(self, console: Console, errors: str | None) -> None:
        """Create a display; `errors` is the path of the file that lists all failures."""
        self._console = console
        self._errors = errors
        self._failures = 0
        self._next = time.monotonic() + _BETWEEN_LINES
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=_RATE_SECONDS,
        )
        self._task = self._progress.add_task("lines", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def moved(self, counts: Counts) -> None:
        # Lines that were stored before took no time.
        total = None if counts.total is None else counts.total - counts.skipped
        completed = counts.done - counts.skipped
        words = describe(counts)
        self._progress.update(self._task, total=total, completed=completed, description=words)
        if not self._console.is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + _BETWEEN_LINES
            of = "" if counts.total is None else f"/{counts.total:,}"
            left = self._progress.tasks[0].time_remaining
            eta = "" if left is None else f", ETA {duration(left)}"
            self.say(f"{counts.done:,}{of} {words}{eta}")

    def failed(self, failed: Failed) -> None:
        self._failures += 1
        if self._failures <= _MOST_FAILURES:
            reason = visible(" ".join(failed.reason.split()))
            if len(reason) > _LONGEST_REASON:
                reason = f"{reason[:_LONGEST_REASON]}…"
            self.say(f"line {failed.line}: {reason}")
        if self._failures == _MOST_FAILURES:
            where = f"others are in {self._errors}" if self._errors else "others are not listed"
            self.say(f"{_MOST_FAILURES} lines failed; {where}")

    def say(self, words: str) -> None:
        """Print a line above the bar."""
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)


def describe(counts: Counts) -> str:
    seconds = max(counts.seconds, 1e-9)
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    speed = f"{counts.rows / seconds:,.0f} rows/s, {counts.nbytes / seconds / 1e6:,.1f} MB/s"
    return f"lines{failed}, {speed}"


def duration(seconds: float) -> str:
    """Format seconds as `1:02:03`."""
    return str(timedelta(seconds=round(seconds)))


def conclude(summary: Summary) -> str:
    counts = summary.counts
    stored = counts.skipped + counts.stored
    of = "" if counts.total is None else f" of {counts.total:,}"
    seconds = max(counts.seconds, 1e-9)
    lines = [
        f"{summary.out}: {stored:,}{of} lines are stored; {counts.rows:,} rows, "
        f"{counts.nbytes / 1e6:,.1f} MB in {duration(counts.seconds)}, "
        f"{counts.rows / seconds:,.0f} rows/s"
    ]
    if counts.skipped:
        lines.append(f"{counts.skipped:,} of them were stored before this run")
    if counts.failed:
        where = f": see {summary.errors}" if summary.errors else ""
        lines.append(f"{counts.failed:,} failed{where}")
    if summary.interrupted:
        lines.append("not all of the data was captured; continue with --resume")
    return "\n".join(lines)
