"""Progress display of a job: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from midstream.console import visible
from midstream.lab.jobs.rates import Meter, clock
from midstream.lab.jobs.records import Failed
from midstream.lab.jobs.run import Counts, Summary

_MOST_FAILURES = 20
_LONGEST_REASON = 300
_BETWEEN_FRAMES = 0.2  # seconds
_BETWEEN_LINES = 10.0


class Display:
    """A `Watch` that prints progress and failures."""

    def __init__(self, console: Console, errors: str | None) -> None:
        """Create a display; `errors` is the path of the file that lists all failures."""
        self._console = console
        self._errors = errors
        self._meter = Meter()
        self._failures = 0
        self._next = 0.0
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def moved(self, counts: Counts) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        is_first = not self._next
        self._next = now + (_BETWEEN_FRAMES if self._console.is_terminal else _BETWEEN_LINES)
        self._meter.note(counts)
        words = describe(counts, self._meter)
        if self._console.is_terminal:
            self._progress.update(
                self._task, total=counts.total, completed=counts.done, description=words
            )
        elif not is_first:
            self.say(words)

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


def describe(counts: Counts, meter: Meter) -> str:
    total = "" if counts.total is None else f"/{counts.total:,}"
    parts = [f"{counts.done:,}{total} lines"]
    if counts.failed:
        parts.append(f"{counts.failed:,} failed")
    parts.append(str(meter))
    left = meter.left(counts)
    if left is not None:
        parts.append(f"ETA {clock(left)}")
    return ", ".join(parts)


def conclude(summary: Summary) -> str:
    counts = summary.counts
    stored = counts.skipped + counts.stored
    of = "" if counts.total is None else f" of {counts.total:,}"
    seconds = max(counts.seconds, 1e-9)
    lines = [
        f"{summary.out}: {stored:,}{of} lines are stored; {counts.rows:,} rows, "
        f"{counts.nbytes / 1e6:,.1f} MB in {clock(counts.seconds)}, "
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
