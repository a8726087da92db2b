"""Speed and remaining time of a job."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from midstream.lab.jobs.run import Counts

# Seconds. Long enough to average over results that arrive for many requests at once.
_WINDOW = 20.0


class Meter:
    """Moving averages over the last `_WINDOW` seconds."""

    def __init__(self) -> None:
        self._samples: deque[Counts] = deque([Counts()])

    def note(self, counts: Counts) -> None:
        """Record the progress; to be called often."""
        self._samples.append(replace(counts))
        while len(self._samples) > 2 and self._samples[1].seconds < counts.seconds - _WINDOW:
            self._samples.popleft()

    @property
    def rows(self) -> float:
        return self._rate(self._samples[-1].rows - self._samples[0].rows)

    @property
    def nbytes(self) -> float:
        return self._rate(self._samples[-1].nbytes - self._samples[0].nbytes)

    def left(self, counts: Counts) -> float | None:
        """Return the estimated remaining time in seconds; None if it is unknown."""
        # Lines that were stored before took no time.
        first, last = self._samples[0], self._samples[-1]
        lines = self._rate(last.done - last.skipped - (first.done - first.skipped))
        if counts.total is None or not lines:
            return None
        return max(0, counts.total - counts.done) / lines

    def __str__(self) -> str:
        return f"{self.rows:,.0f} rows/s, {self.nbytes / 1e6:,.1f} MB/s"

    def _rate(self, amount: float) -> float:
        took = self._samples[-1].seconds - self._samples[0].seconds
        return amount / took if took > 0 else 0.0


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
