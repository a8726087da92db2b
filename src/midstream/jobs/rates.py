"""How fast a job is, and when it will have ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from midstream.jobs.run import Counts

_WINDOW = 20.0  # seconds; results come for many requests at once


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    lines: int
    rows: int
    nbytes: int


class Meter:
    """Rates over the last while."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque([_Sample(0.0, 0, 0, 0)])

    def note(self, counts: Counts) -> None:
        """Takes note of how far it is; often."""
        # What the store had before costs no time.
        lines = counts.captured + counts.failed
        self._samples.append(_Sample(counts.seconds, lines, counts.rows, counts.nbytes))
        while len(self._samples) > 2 and self._samples[1].seconds < counts.seconds - _WINDOW:
            self._samples.popleft()

    @property
    def rows(self) -> float:
        """Rows a second."""
        return self._rate(self._samples[-1].rows - self._samples[0].rows)

    @property
    def nbytes(self) -> float:
        """Bytes a second."""
        return self._rate(self._samples[-1].nbytes - self._samples[0].nbytes)

    def left(self, counts: Counts) -> float | None:
        """In how many seconds it will have ended; None: that is not known."""
        lines = self._rate(self._samples[-1].lines - self._samples[0].lines)
        if counts.total is None or not lines:
            return None
        return max(0, counts.total - counts.done) / lines

    def __str__(self) -> str:
        return f"{self.rows:,.0f} rows/s, {self.nbytes / 1e6:,.1f} MB/s"

    def _rate(self, amount: float) -> float:
        took = self._samples[-1].seconds - self._samples[0].seconds
        return amount / took if took > 0 else 0.0


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
