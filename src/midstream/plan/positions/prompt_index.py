"""Indices of one prompt: where any number of texts and token ids are, without a pass for each.

A text is looked up among the sorted suffixes of the prompt's text, by bisection. Its cost is its
own length times the logarithm of the prompt's; sorting the suffixes does not depend on the texts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from midstream.plan.positions.ranges import Ranges
from midstream.plan.positions.work import WorkBudget

Ints: TypeAlias = "NDArray[np.int64]"

_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)
_NONE: Ints = np.zeros(0, dtype=np.int64)
# Occurrences that are kept for later selections of the same prompt.
_MAX_KEPT = 1 << 18


class TextIndex:
    """Finds texts that begin and end at the edges of tokens, apart from whitespace.

    Occurrences can only begin at a token's first character, at one that has only whitespace of that
    token before it, or at one that has only whitespace of it from there on: then with the next
    token. They end likewise. These places are numbered in the order of tokens.
    """

    def __init__(self, text: str, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Create it; see `TextMap` for the arguments."""
        self._text = text
        self._starts = np.asarray(starts, dtype=np.int64)
        self._stops = np.asarray(stops, dtype=np.int64)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        length = len(text)
        is_space = np.isin(codes, _SPACES)
        solid = np.where(is_space, length, np.arange(length))
        # Of each character, the last at or before it that is no whitespace.
        before = np.maximum.accumulate(np.where(is_space, -1, np.arange(length)))
        # Of each character, and of the text's end, the first at or after it that is no whitespace.
        solid = np.minimum.accumulate(np.append(solid, length)[::-1])[::-1]
        self._places, self._firsts = self._places_of_tokens(solid, before)
        # Of each end of an occurrence, where it ends by tokens: there, if the token of its last
        # character has only whitespace after it; where that token starts, if it has only whitespace
        # before it; else −1.
        ends = np.arange(length + 1)
        token = np.searchsorted(self._starts, ends, "left") - 1
        start, stop = (self._starts[token], self._stops[token]) if starts else (ends, ends)
        self._is_end = (ends >= stop) | (solid >= stop)
        self._ends = np.where(self._is_end, ends, np.where(solid[start] >= ends, start, -1))
        self._ranks = np.unique(codes, return_inverse=True)[1].astype(np.int64).reshape(-1)
        self._width = 1  # characters by which suffixes are sorted so far
        self._sort()
        self._kept: dict[str, Ints] = {}
        self._num_kept = 0

    def find(self, wanted: str, budget: WorkBudget) -> Ints:
        """Return the numbers of the places at which a text occurs, ascending."""
        kept = self._kept.get(wanted)
        if kept is not None:
            budget.match(len(kept))
            return kept
        size, text = len(wanted), self._text
        if size > len(text):
            return _NONE
        self._sort_by(size)

        def part(place: int) -> str:
            return text[place : place + size]

        low = bisect_left(self._sorted_places, wanted, key=part)
        if low == len(self._sorted_places) or part(self._sorted_places[low]) != wanted:
            return _NONE
        high = bisect_right(self._sorted_places, wanted, low, key=part)
        budget.match(high - low)
        numbers = self._sorted[low:high]
        begins, firsts = self._places[numbers], self._firsts[numbers]
        is_found = firsts < self._ends[begins + size]
        if wanted.isspace():
            # It has nothing beside its ends: these are at boundaries, or it is not found.
            is_found = self._is_end[begins + size] & (firsts == begins)
        numbers = np.sort(numbers[is_found])
        if self._num_kept + len(numbers) <= _MAX_KEPT:
            self._num_kept += len(numbers)
            self._kept[wanted] = numbers
        return numbers

    def ranges(self, numbers: Ints, size: int) -> Ranges:
        """Return the tokens of the occurrences at some places, by their numbers."""
        firsts = np.searchsorted(self._stops, self._firsts[numbers], "right")
        ends = self._ends[self._places[numbers] + size]
        return merged(firsts, np.searchsorted(self._starts, ends, "left"))

    def _places_of_tokens(self, solid: Ints, before: Ints) -> tuple[Ints, Ints]:
        """Return the places of all tokens, and where the first token from each place starts."""
        starts, stops = self._starts, self._stops
        is_own = stops > starts
        is_own[1:] &= (starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1])
        starts, stops = starts[is_own], stops[is_own]
        heads = np.minimum(solid[starts] + 1, stops)
        tails = np.maximum(heads, before[stops - 1] + 1)
        begins = _expand(starts, heads - starts)
        places = np.append(begins, _expand(tails, stops - tails))
        firsts = np.append(begins, np.repeat(stops, stops - tails))
        order = np.argsort(places, kind="stable")
        return places[order], firsts[order]

    def _sort_by(self, size: int) -> None:
        """Sort the suffixes by so many of their first characters."""
        before = self._width
        length = len(self._ranks)
        while self._width < size and self._ranks.max() + 1 < length:
            after = np.zeros(length, dtype=np.int64)
            after[: length - self._width] = self._ranks[self._width :] + 1
            keys = self._ranks * (length + 1) + after
            self._ranks = np.unique(keys, return_inverse=True)[1].astype(np.int64).reshape(-1)
            self._width *= 2
        if self._width != before:
            self._sort()

    def _sort(self) -> None:
        """Order the places by the ranks of their suffixes."""
        self._sorted = np.argsort(self._ranks[self._places], kind="stable")
        self._sorted_places: list[int] = self._places[self._sorted].tolist()


class TokenIndex:
    """Finds the tokens of a prompt that have one of some ids."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        ids = np.asarray(token_ids, dtype=np.int64)
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]

    def find(self, ids: Iterable[int], budget: WorkBudget) -> Ranges:
        """Return the positions of the tokens with one of these ids."""
        wanted = np.fromiter(ids, dtype=np.int64)
        first = np.searchsorted(self._ids, wanted, "left")
        counts = np.searchsorted(self._ids, wanted, "right") - first
        budget.match(int(counts.sum()))
        positions = self._order[_expand(first, counts)]
        return merged(positions, positions + 1)


def merged(starts: Ints, stops: Ints) -> Ranges:
    """Return the union of non-empty, bounded ranges, given in any order."""
    if not len(starts):
        return ()
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    is_first = np.append(True, starts[1:] > stops[:-1])
    last = np.append(np.flatnonzero(is_first)[1:], len(starts)) - 1
    return tuple(zip(starts[is_first].tolist(), stops[last].tolist(), strict=True))


def _expand(starts: Ints, counts: Ints) -> Ints:
    """Return start, start + 1, … of each start, as many as its count."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
