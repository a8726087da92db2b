"""Probe scores of one step, from a worker to the engine core in the output of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.protocol.runs import within_runs
from midstream.runtime.vllm.attributes import STEP_SCORES


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds of the scores in some columns, each inside."""

    slots: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class ScoresOfStep:
    """Scores of a step's requests that report, of consecutive positions; some may lack one."""

    ids: list[str]
    first: list[int]
    row: list[int]  # that of `values` for the first position; later ones follow
    length: list[int]  # number of positions
    values: NDArray[np.float32]  # [rows, slots]
    _columns: dict[int, list[float]] = field(default_factory=dict)
    _within: dict[Bounds, list[bool]] = field(default_factory=dict)

    def at(self, index: int, slot: int, positions: Sequence[int]) -> list[float]:
        """Return the scores in a column at some positions of the nth request."""
        if not positions:
            return []
        column = self.column(slot)
        shift = self.row[index] - self.first[index]
        if isinstance(positions, range):
            return column[positions.start + shift : positions.stop + shift]
        return [column[position + shift] for position in positions]

    def numbers(self, index: int, slots: range, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return the scores in several columns likewise, [positions, slots]."""
        if not positions:  # whose range may end before it begins, and before the first row
            return self.values[:0, slots.start : slots.stop]
        shift = self.row[index] - self.first[index]
        columns = slice(slots.start, slots.stop)
        if isinstance(positions, range):
            return self.values[positions.start + shift : positions.stop + shift, columns]
        return self.values[[position + shift for position in positions], columns]

    def num_within(self, index: int, slot: int, positions: range, low: float, high: float) -> int:
        """Return how many scores come before the first that is finite and not in [low, high]."""
        shift = self.row[index] - self.first[index]
        scores = self.values[positions.start + shift : positions.stop + shift, slot]
        # A bound in double precision, as for a score alone: it would be rounded to the scores' own.
        is_beyond = (scores < np.float64(low)) | (scores > np.float64(high))
        beyond = np.flatnonzero(is_beyond & np.isfinite(scores))
        return int(beyond[0]) if beyond.size else len(positions)

    def within(self, bounds: Bounds) -> list[bool]:
        """Return of each row whether its scores are within their bounds; NaN is not."""
        is_within = self._within.get(bounds)
        if is_within is None:
            # At once for all requests, which share the bounds of server-wide probes. In double
            # precision, as above.
            scores = self.values[:, bounds.slots].astype(np.float64)
            inside: NDArray[np.bool_] = (scores >= bounds.low) & (scores <= bounds.high)
            rows = np.asarray(inside.all(1))
            is_within = self._within[bounds] = rows.tolist()
        return is_within

    def column(self, slot: int) -> list[float]:
        """Return the scores in a column, of each row."""
        column = self._columns.get(slot)
        if column is None:
            # At once for all requests: an index of numpy takes as long as a hundred of a list.
            column = self._columns[slot] = self.values[:, slot].tolist()
        return column

    def alone(self) -> ScoresOfStep:
        """Return the same without rows of other requests."""
        length = np.array(self.length, np.int64)
        rows = np.repeat(np.array(self.row, np.int64), length) + within_runs(length)
        row = np.cumsum(length) - length
        return ScoresOfStep(self.ids, self.first, row.tolist(), self.length, self.values[rows])


def scores_of_runs(
    ids: list[str],
    first: list[int],
    row: list[int],
    length: list[int],
    values: NDArray[np.float32],
) -> ScoresOfStep:
    """Return the scores of runs of rows, of which a request may have several in any order."""
    if len(set(ids)) == len(ids):
        return ScoresOfStep(ids, first, row, length, values)
    spans: dict[str, tuple[int, int, int]] = {}
    for name, start, at, count in zip(ids, first, row, length, strict=True):
        low, place, end = spans.get(name, (start, at, start))
        spans[name] = min(low, start), min(place, at), max(end, start + count)
    joined = list(spans.values())
    return ScoresOfStep(
        list(spans),
        [low for low, _, _ in joined],
        [place for _, place, _ in joined],
        [end - low for low, _, end in joined],
        values,
    )


class StepScores:
    """Scores of a step; only to read or pickle them, after the step's tokens, waits for them."""

    def __init__(self, read: Callable[[], ScoresOfStep]) -> None:
        self._read = read

    def values(self) -> ScoresOfStep:
        return self._read()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.values().alone(),)


def _arrived(values: ScoresOfStep) -> StepScores:
    return StepScores(lambda: values)


def scores_of(output: Any) -> StepScores | None:
    """Return the scores that a worker attached to a ModelRunnerOutput; None: there are none."""
    return STEP_SCORES.get(output)
