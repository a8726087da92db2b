"""What is known so far of a completion that goes on: its tokens, and the scores of its probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.results.probe_scores import Probes
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.scores import ScoreBlock, Span
from midstream.runtime.protocol.segments import FOREVER
from midstream.spec import ResolvedPlan
from midstream.spec.positions.position_set import Where
from midstream.spec.positions.ranges import Ranges


class StreamState:
    """One completion's tokens and scores, as its outputs come.

    The cost of an output depends on what is new in it, but for the copies that its caller gets.
    """

    def __init__(self, plan: ResolvedPlan, prompt: Sequence[int]) -> None:
        """Args:
        plan: what was asked for.
        prompt: the prompt's token ids.
        """
        self._prompt_len = len(prompt)
        self._tokens = _Growing(np.int64)
        self._tokens.extend(np.array(prompt, np.int64))
        self._asked_up_to = 0
        self._scores = [_Scores(probe) for probe in plan.probes if probe.name]

    @property
    def tokens(self) -> Ints:
        """int64, the ids of the tokens that are known, prompt first. They do not change."""
        return self._tokens.values

    @property
    def generated(self) -> list[int]:
        """The generated tokens."""
        tokens: list[int] = self._tokens.values[self._prompt_len :].tolist()
        return tokens

    def see(self, completion: Any, is_delta: bool) -> None:
        """Takes in the tokens of an output.

        Args:
            completion: vLLM's CompletionOutput.
            is_delta: whether it has only the tokens since the one before, or all.
        """
        known = 0 if is_delta else len(self._tokens.values) - self._prompt_len
        self._tokens.extend(np.array(completion.token_ids[known:], np.int64))

    def next_span(self) -> Span | None:
        """[start, stop) of the positions that were computed since this was last asked; None where
        no probe selects any of them.
        """
        # The last token that was sampled has not been computed on.
        start, stop = self._asked_up_to, len(self._tokens.values) - 1
        if not self._scores or stop <= start:
            return None
        self._asked_up_to = stop
        tokens = self._tokens.values
        # Not `any`, which would end at the first: each probe takes note of what it selects.
        selected = [scores.select(start, stop, tokens) for scores in self._scores]
        return (start, stop) if any(selected) else None

    def add(self, seen: list[ScoreBlock]) -> None:
        """Takes in what the workers have of the span that was asked for."""
        for scores in self._scores:
            scores.add(seen)

    def probes(self) -> Probes | None:
        """The scores so far; None where no probe was asked for."""
        if not self._scores:
            return None
        return Probes(
            {one.name: torch.from_numpy(one.values.values.copy()) for one in self._scores},
            {one.name: torch.from_numpy(one.positions.values.copy()) for one in self._scores},
            torch.from_numpy(self._tokens.values[:-1]),
        )


class _Scores:
    """One probe's scores, ascending by position.

    The final row is not known before the end: where a probe asks for that, it is left out.
    """

    def __init__(self, probe: Any) -> None:
        self.name: str = probe.name
        self._tap = (probe.site, probe.layer)
        self._slot: int = probe.slot
        self._where = Selection(probe.where)
        self._wanted: Ints = np.zeros(0, np.int64)
        self.values = _Growing(np.float32)
        self.positions = _Growing(np.int64)

    def select(self, start: int, stop: int, tokens: Ints) -> bool:
        """Whether any of these positions is wanted; `add` gets their scores."""
        self._wanted = self._where.within(start, stop, tokens)
        return bool(self._wanted.size)

    def add(self, seen: list[ScoreBlock]) -> None:
        for block in seen:
            if self._tap in block.worker.taps:
                mine = np.isin(block.positions, self._wanted)
                self.positions.extend(block.positions[mine])
                self.values.extend(block.values[:, self._slot].numpy()[mine])


class Selection:
    """A selection, asked for a few positions at a time."""

    def __init__(self, where: Where) -> None:
        self._ranges = _bounds(where.ranges)
        self._matches = [(_bounds(m.ranges), np.array(m.ids), m.others) for m in where.matches]

    def within(self, start: int, stop: int, tokens: Ints) -> Ints:
        """The selected positions of [start, stop), given the id of each position's token."""
        positions = np.arange(start, stop)
        selected = _inside(self._ranges, positions)
        for bounds, ids, others in self._matches:
            selected |= _inside(bounds, positions) & (np.isin(tokens[start:stop], ids) != others)
        return positions[selected]


class _Growing:
    """An array that grows at its end. What was handed out of it never changes."""

    def __init__(self, dtype: Any) -> None:
        self._held = np.zeros(64, dtype)
        self._size = 0

    @property
    def values(self) -> NDArray[Any]:
        return self._held[: self._size]

    def extend(self, values: NDArray[Any]) -> None:
        size = self._size + len(values)
        if size > len(self._held):
            grown = np.zeros(max(size, 2 * len(self._held)), self._held.dtype)
            grown[: self._size] = self.values
            self._held = grown
        self._held[self._size : size] = values
        self._size = size


def _bounds(ranges: Ranges) -> tuple[Ints, Ints]:
    """The ranges' starts, and their stops."""
    pairs = [(start, FOREVER if stop is None else stop) for start, stop in ranges]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _inside(bounds: tuple[Ints, Ints], positions: Ints) -> NDArray[np.bool_]:
    """Which positions are in one of some sorted, disjoint ranges."""
    starts, stops = bounds
    if not starts.size:
        return np.zeros(positions.size, np.bool_)
    nearest = np.searchsorted(starts, positions, side="right") - 1
    inside: NDArray[np.bool_] = (nearest >= 0) & (positions < stops[nearest])
    return inside
