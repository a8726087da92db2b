"""Drift of scores: the population stability index of live scores against those of the training."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.validation import (
    MAX_ITEMS,
    at,
    is_int,
    read_count,
    read_fields,
    read_float32,
    show,
)

MOST_BINS = 256
LEAST_SCORES = 200
SECONDS = 3600.0  # length of a window by default
# What is added to the count of each bin, so that an empty one has a logarithm: half a score.
SMOOTHED = 0.5
_SLOTS = 60  # parts of a window of time, of which the oldest is dropped as a whole
_MOST_SCORES = 1 << 20


@dataclass(frozen=True, slots=True)
class ScoreBins:
    """How many scores of the training were in each of B bins.

    Bin i has the scores s with edges[i - 1] <= s < edges[i]; the first and the last are open.

    Attributes:
        edges: B - 1 finite numbers, ascending, in units of the score.
        counts: B counts of scores, not all of them 0.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises SpecError if a field is out of range."""
        with at("edges"):
            if not 1 <= len(self.edges) < MOST_BINS:
                raise SpecError("", f"expected 1 to {MOST_BINS - 1} edges, got {len(self.edges)}")
            for index, edge in enumerate(self.edges):
                if not math.isfinite(edge):
                    raise SpecError(f"[{index}]", f"expected a finite number, got {edge}")
                if index and edge <= self.edges[index - 1]:
                    raise SpecError(
                        f"[{index}]", f"expected more than {self.edges[index - 1]}, got {edge}"
                    )
        with at("counts"):
            if len(self.counts) != len(self.edges) + 1:
                raise SpecError(
                    "",
                    f"expected {len(self.edges) + 1} counts, one more than edges, got "
                    f"{len(self.counts)}",
                )
            if not sum(self.counts):
                raise SpecError("", "expected counts of scores, got zeros")

    @staticmethod
    def of_scores(scores: Iterable[float], bins: int = 10) -> ScoreBins:
        """Return quantile bins of the training's scores: as many scores in each, but for ties.

        Args:
            scores: finite numbers.
            bins: number of bins, 2 to 256; with ties there may be fewer.

        Raises:
            SpecError: no score, one that is not finite, or another number of bins.
        """
        import numpy as np

        if not 2 <= bins <= MOST_BINS:
            raise SpecError("bins", f"expected 2 to {MOST_BINS}, got {bins}")
        values = np.asarray(list(scores), np.float64)
        if not values.size or not np.isfinite(values).all():
            raise SpecError("scores", "expected one or more finite numbers")
        edges = np.unique(np.quantile(values, np.arange(1, bins) / bins))
        counts = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1)
        return ScoreBins(tuple(map(float, edges)), tuple(map(int, counts)))

    @staticmethod
    def parse(value: object) -> ScoreBins:
        """Read `{"edges": [...], "counts": [...]}`, the form of `to_dict`.

        Raises:
            SpecError: another form; its path starts with the field's name.
        """
        if isinstance(value, ScoreBins):
            return value
        fields = read_fields(value, ("edges", "counts"))
        for name in ("edges", "counts"):
            if not isinstance(fields[name], (list, tuple)) or len(fields[name]) > MAX_ITEMS:
                raise SpecError(name, f"expected a list of numbers, got {show(fields[name])}")
        edges = []
        for index, edge in enumerate(fields["edges"]):
            if not is_int(edge) and not isinstance(edge, float):
                raise SpecError(f"edges[{index}]", f"expected a number, got {show(edge)}")
            edges.append(float(edge))
        counts = []
        for index, count in enumerate(fields["counts"]):
            with at(f"counts[{index}]"):
                counts.append(read_count(count, 0))
        return ScoreBins(tuple(edges), tuple(counts))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `parse` reads."""
        return {"edges": list(self.edges), "counts": list(self.counts)}

    def bin_of(self, score: float) -> int:
        """Return the bin of a score that is a number, from 0."""
        return bisect_right(self.edges, score)


def stability_index(expected: Sequence[int], actual: Sequence[int]) -> float:
    """Return the population stability index of two lists of counts by bin, in nats.

    Σ (a - e) · ln(a / e) over the bins, where a and e are shares. A share is
    (count + 0.5) / (all counts + 0.5 · bins), so that an empty bin has one too. Usual readings:
    below 0.1 no drift, above 0.2 or 0.25 much. Of n and m scores of one distribution it is about
    (bins - 1) · (1/n + 1/m). Siddiqi 2006, Credit Risk Scorecards; Yurdakul 2018.

    Raises:
        ValueError: the lists have different lengths.
    """
    if len(expected) != len(actual):
        raise ValueError(f"expected {len(expected)} counts, got {len(actual)}")
    extra = SMOOTHED * len(expected)
    shares = [
        ((e + SMOOTHED) / (sum(expected) + extra), (a + SMOOTHED) / (sum(actual) + extra))
        for e, a in zip(expected, actual, strict=True)
    ]
    return sum((a - e) * math.log(a / e) for e, a in shares)


class DriftWindow:
    """Counts of the latest scores by bin: of the last `scores`, or of the last `seconds`.

    A score takes O(log bins). A window of scores takes a byte for each, one of time 60 lists of
    counts: its oldest scores leave it by a sixtieth of the time at once. Not thread-safe.
    """

    def __init__(
        self,
        training: ScoreBins,
        *,
        scores: int | None = None,
        seconds: float | None = None,
        least: int = LEAST_SCORES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty window.

        Args:
            training: the distribution to compare with.
            scores: length of the window in scores, 1 to 2**20; one of this and `seconds`.
            seconds: length of the window in seconds.
            least: number of scores below which there is no index.
            clock: seconds that only grow.

        Raises:
            SpecError: both lengths or none, or one out of range.
        """
        if (scores is None) == (seconds is None):
            raise SpecError("", "expected one of `scores` and `seconds`")
        if scores is not None and not 1 <= scores <= _MOST_SCORES:
            raise SpecError("scores", f"expected 1 to {_MOST_SCORES}, got {show(scores)}")
        if seconds is not None and not 0 < seconds < math.inf:
            raise SpecError("seconds", f"expected more than 0, got {seconds}")
        if not 1 <= least <= (scores or _MOST_SCORES):
            raise SpecError("least", f"expected 1 to {scores or _MOST_SCORES}, got {show(least)}")
        self.training = training
        self.skipped = 0  # scores that are NaN, which are in no bin
        self._counts = [0] * len(training.counts)
        self._least = least
        self._size = 0  # scores in the window
        self._ring = bytearray(scores or 0)  # bins of the last scores
        self._place = 0  # of the ring, where the next bin is written
        self._slots: deque[tuple[int, list[int]]] = deque()  # (number, counts) of parts of time
        self._slot_seconds = (seconds or 0.0) / _SLOTS
        self._clock = clock

    def add(self, score: float) -> None:
        """Count a score; an infinite one is in the first or last bin."""
        if math.isnan(score):
            self.skipped += 1
            return
        index = self.training.bin_of(score)
        if self._ring:
            self._replace(index)
        else:
            self._current_slot()[index] += 1
        self._counts[index] += 1
        self._size += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Scores in the window by bin."""
        self._expire()
        return tuple(self._counts)

    def psi(self) -> float | None:
        """Return the index of the window; None: it has fewer than `least` scores."""
        self._expire()
        if self._size < self._least:
            return None
        return stability_index(self.training.counts, self._counts)

    def _replace(self, index: int) -> None:
        """Write a bin into the ring, in place of the oldest if that is full."""
        if self._size == len(self._ring):
            self._counts[self._ring[self._place]] -= 1
            self._size -= 1
        self._ring[self._place] = index
        self._place = (self._place + 1) % len(self._ring)

    def _current_slot(self) -> list[int]:
        self._expire()
        number = int(self._clock() / self._slot_seconds)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, [0] * len(self._counts)))
        return self._slots[-1][1]

    def _expire(self) -> None:
        """Drop the parts of a window of time that have left it."""
        while self._slots:
            number, counts = self._slots[0]
            if number > int(self._clock() / self._slot_seconds) - _SLOTS:
                break
            self._slots.popleft()
            self._size -= sum(counts)
            self._counts = [
                total - count for total, count in zip(self._counts, counts, strict=True)
            ]


@dataclass(frozen=True, slots=True)
class Training:
    """The scores of a probe's training, and the window of live scores to compare with them.

    Attributes:
        bins: the scores of the training.
        scores: length of the window in scores; None: see `seconds`.
        seconds: length of the window in seconds.
    """

    bins: ScoreBins
    scores: int | None = None
    seconds: float | None = SECONDS

    @staticmethod
    def parse(value: object) -> Training:
        """Read `{"edges": […], "counts": […]}`, with `scores` or `seconds` for another window.

        Raises:
            SpecError: another form; its path starts with the field's name.
        """
        if isinstance(value, Training):
            return value
        fields = read_fields(value, ("edges", "counts"), ("scores", "seconds"))
        scores, seconds = fields.pop("scores", None), fields.pop("seconds", None)
        if scores is not None:
            with at("scores"):
                scores = read_count(scores)
        if seconds is not None:
            with at("seconds"):
                seconds = read_float32(seconds)
        if scores is None and seconds is None:
            seconds = SECONDS
        training = Training(ScoreBins.parse(fields), scores, seconds)
        training.window()
        return training

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `parse` reads."""
        form = self.bins.to_dict()
        if self.scores is not None:
            form["scores"] = self.scores
        elif self.seconds != SECONDS:
            form["seconds"] = self.seconds
        return form

    def window(
        self, least: int = LEAST_SCORES, clock: Callable[[], float] = time.monotonic
    ) -> DriftWindow:
        """Return an empty window. Raises SpecError: its length is out of range."""
        least = min(least, self.scores or least)
        return DriftWindow(
            self.bins, scores=self.scores, seconds=self.seconds, least=least, clock=clock
        )


class DriftMonitor:
    """Windows of the latest scores of guards, each of the newest version that has scored."""

    def __init__(
        self, least: int = LEAST_SCORES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it; `least`: number of scores below which there is no index."""
        self._least = least
        self._clock = clock
        self._windows: dict[str, tuple[int, DriftWindow]] = {}

    def add(self, guard: str, version: int, training: Training, score: float) -> None:
        """Count a score. One of an earlier version, of a request that began before, is ignored."""
        newest, window = self._windows.get(guard, (-1, None))
        if version < newest:
            return
        if window is None or version > newest:
            window = training.window(self._least, self._clock)
            self._windows[guard] = (version, window)
        window.add(score)

    def keep(self, guards: Iterable[str]) -> None:
        """Forget all other guards, which were deleted."""
        for guard in self._windows.keys() - set(guards):
            del self._windows[guard]

    def indices(self) -> dict[tuple[str, int], float]:
        """Return the index by guard and version, of those with enough scores."""
        indices = {}
        for guard, (version, window) in self._windows.items():
            index = window.psi()
            if index is not None:
                indices[guard, version] = index
        return indices
