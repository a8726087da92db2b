"""Tokens and probe scores of a running completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.plan import ResolvedPlan, ResolvedProbe
from midstream.plan.positions.position_set import Reached, Where
from midstream.plan.positions.ranges import Ranges
from midstream.plan.scores.rule import NO_TOKENS
from midstream.results.probe_scores import Probes
from midstream.runtime.protocol.rank_parts import probe_numbers
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.scores import ScoreBlock, Span
from midstream.runtime.protocol.segments import FOREVER


class StreamState:
    """Tokens and scores of one completion, updated at the cost of what is new."""

    def __init__(self, plan: ResolvedPlan, prompt: Sequence[int]) -> None:
        self._prompt_len = len(prompt)
        self._tokens = _Growing(np.int64)
        self._tokens.extend(np.array(prompt, np.int64))
        self._requested = 0
        self._scores = [_Scores(probe) for probe in plan.probes if probe.name]

    @property
    def tokens(self) -> Ints:
        """Ids of all known tokens, prompt first. The array never changes."""
        return self._tokens.values

    @property
    def generated(self) -> list[int]:
        tokens: list[int] = self._tokens.values[self._prompt_len :].tolist()
        return tokens

    def record(self, completion: Any, is_delta: bool) -> None:
        """Record the tokens of an output: those since the previous one, or all."""
        known = 0 if is_delta else len(self._tokens.values) - self._prompt_len
        self._tokens.extend(np.array(completion.token_ids[known:], np.int64))

    def next_span(self) -> Span | None:
        """Return [start, stop) of what was computed since the last call, if a probe is there."""
        # The last sampled token was not computed on.
        start, stop = self._requested, len(self._tokens.values) - 1
        if not self._scores or stop <= start:
            return None
        self._requested = stop
        tokens = self._tokens.values
        # A list, as `any` would end at the first: each probe records what it selects.
        selected = [scores.select(start, stop, tokens) for scores in self._scores]
        return (start, stop) if any(selected) else None

    def add(self, blocks: list[ScoreBlock]) -> None:
        for scores in self._scores:
            scores.add(blocks)

    def probes(self) -> Probes | None:
        """Return the scores so far; None: the plan has no named probes."""
        if not self._scores:
            return None
        return Probes(
            {scores.name: torch.from_numpy(scores.values.values.copy()) for scores in self._scores},
            {
                scores.name: torch.from_numpy(scores.positions.values.copy())
                for scores in self._scores
            },
            torch.from_numpy(self._tokens.values[:-1]),
            {scores.name: scores.outputs for scores in self._scores if scores.outputs},
        )


class _Scores:
    """Scores of one probe by position; that of a last row is not known before the end."""

    def __init__(self, probe: ResolvedProbe) -> None:
        self.name = probe.name
        self.outputs = probe.outputs
        self._probe = probe
        self._state = NO_TOKENS
        self._where = ScoreSelection(probe.where)
        self._wanted: Ints = np.zeros(0, np.int64)
        self._reached: Reached = {}
        several = probe.rule.outputs
        self.values = _Growing(np.float32, (several,) if several else ())
        self.positions = _Growing(np.int64)

    def select(self, start: int, stop: int, tokens: Ints) -> bool:
        """Select positions in [start, stop) for `add`; return whether there are any."""
        self._wanted = self._where.within(start, stop, tokens, self._reached)
        return bool(self._wanted.size)

    def add(self, blocks: list[ScoreBlock]) -> None:
        sent = [(block.worker, block.positions, block.values) for block in blocks]
        for known, numbers in probe_numbers(self._probe, sent):
            if not np.array_equal(known, self._wanted):
                mine = np.isin(known, self._wanted)
                known, numbers = known[mine], numbers[mine]
            self._state, scores = self._probe.rule.follow(self._state, numbers)
            self.positions.extend(known)
            self.values.extend(scores)


class ScoreSelection:
    """A selection of positions, evaluated for some positions at a time."""

    def __init__(self, where: Where) -> None:
        self._ranges = _bounds(where.ranges)
        self._matches = [(_bounds(m.ranges), np.array(m.ids), m) for m in where.matches]

    def within(self, start: int, stop: int, tokens: Ints, reached: Reached = None) -> Ints:
        """Return the selected positions in [start, stop); `tokens` are from position 0 on, and
        `reached` is for `Automaton.selected`.
        """
        positions = np.arange(start, stop)
        selected = _inside(self._ranges, positions)
        for bounds, ids, match in self._matches:
            if match.automaton is None:
                chosen = np.isin(tokens[start:stop], ids) != match.others
            else:
                read = match.automaton.selected(tokens.item, start, stop, reached)
                chosen = np.isin(positions, read)
            selected |= _inside(bounds, positions) & chosen
        return positions[selected]


class _Growing:
    """An array that grows at its end. Arrays that it returned never change."""

    def __init__(self, dtype: Any, row: tuple[int, ...] = ()) -> None:
        self._array = np.zeros((64, *row), dtype)
        self._size = 0

    @property
    def values(self) -> NDArray[Any]:
        return self._array[: self._size]

    def extend(self, values: NDArray[Any]) -> None:
        size = self._size + len(values)
        if size > len(self._array):
            shape = max(size, 2 * len(self._array)), *self._array.shape[1:]
            grown = np.zeros(shape, self._array.dtype)
            grown[: self._size] = self.values
            self._array = grown
        self._array[self._size : size] = values
        self._size = size


def _bounds(ranges: Ranges) -> tuple[Ints, Ints]:
    pairs = [(start, FOREVER if stop is None else stop) for start, stop in ranges]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _inside(bounds: tuple[Ints, Ints], positions: Ints) -> NDArray[np.bool_]:
    """Return which positions are in one of some sorted, disjoint ranges."""
    starts, stops = bounds
    if not starts.size:
        return np.zeros(positions.size, np.bool_)
    nearest = np.searchsorted(starts, positions, side="right") - 1
    inside: NDArray[np.bool_] = (nearest >= 0) & (positions < stops[nearest])
    return inside
