"""`Where`: the positions selected in one request, as far as its prompt determines them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.ranges import Range, Ranges, clip, merge

# Of automata, the position up to which tokens were read, and the state there.
Reached = dict[Automaton, tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class Match:
    """Generated tokens at some positions with one of some ids, ascending, or none (`others`), or
    that an automaton selects.
    """

    ranges: Ranges
    ids: tuple[int, ...] = ()
    others: bool = False
    automaton: Automaton | None = None

    def within(
        self, start: int, stop: int, token: Callable[[int], int], reached: Reached = None
    ) -> list[int]:
        """Return the selected positions of [start, stop); see `Automaton.selected`."""
        spans = [
            (max(first, start), stop if end is None else min(end, stop))
            for first, end in self.ranges
            if first < stop and (end is None or end > start)
        ]
        if self.automaton is not None:
            chosen = self.automaton.selected(token, start, stop, reached)
            bounds = [bound for span in spans for bound in span]
            return [p for p in chosen if bisect_right(bounds, p) % 2]
        ids = frozenset(self.ids)
        return [
            position
            for first, end in spans
            for position in range(first, end)
            if (token(position) in ids) != self.others
        ]


@dataclass(frozen=True, slots=True)
class Where:
    """The positions selected in one request.

    `ranges` and `matches` are pairwise disjoint. The final row, if selected by `last_from`, may
    also be in one of them.

    Attributes:
        ranges: positions that are selected regardless of the generated tokens.
        matches: generated tokens that are selected by their ids, or by tokens before them as well;
            at most two.
        last_from: the request's final row is selected if its position is at least this. None: it
            is not selected. Captures and probes only.
    """

    ranges: Ranges
    matches: tuple[Match, ...] = ()
    last_from: int | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether all positions are known before tokens are generated."""
        fixed = bool(self.ranges) and not self.matches and self.last_from is None
        return fixed and self.ranges[-1][1] is not None

    @property
    def automata(self) -> list[Automaton]:
        return [match.automaton for match in self.matches if match.automaton is not None]

    @property
    def num_ranges(self) -> int:
        """Number of ranges, including those of `matches`."""
        return len(self.ranges) + sum(len(match.ranges) for match in self.matches)

    @property
    def possible(self) -> Ranges:
        """Every position that may be selected, depending on the generated tokens."""
        if not self.matches and self.last_from is None:
            return self.ranges
        ranges = [*self.ranges, *(span for match in self.matches for span in match.ranges)]
        if self.last_from is not None:
            ranges.append((self.last_from, None))
        return merge(ranges)

    def first(self, most: int) -> Where:
        """Return the first positions of the selection, if new tokens cannot change these."""
        ranges: list[Range] = []
        left, end = most, 0
        for start, stop in self.ranges:
            if left:
                end = start + left if stop is None else min(stop, start + left)
                ranges.append((start, end))
                left -= end - start
        later = [match.ranges[0][0] for match in self.matches]
        later += [] if self.last_from is None else [self.last_from]
        if later and (left or min(later) < end):
            raise SpecError(
                "",
                f"which {most} rows are the first depends on what is generated: select positions "
                'without "last_row", and token ids and marks (Between) in the prompt alone',
            )
        return Where(tuple(ranges))

    def within(
        self, start: int, stop: int, token: Callable[[int], int], reached: Reached = None
    ) -> Sequence[int]:
        """Return the selected positions of [start, stop), ascending, without the final row; for
        `reached` see `Automaton.selected`.
        """
        if len(self.ranges) == 1 and not self.matches:
            ((first, end),) = self.ranges
            return range(max(first, start), stop if end is None else min(end, stop))
        positions: list[int] = []
        for first, end in self.ranges:
            positions += range(max(first, start), stop if end is None else min(end, stop))
        for match in self.matches:
            positions += match.within(start, stop, token, reached)
        return sorted(positions)

    def final(self, length: int, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the selected positions of an ended request; of `tokens` those of `matches` are
        read.
        """
        ranges: list[Range] = list(self.ranges)
        for match in self.matches:
            chosen = match.within(0, length, tokens.__getitem__)
            ranges.extend((position, position + 1) for position in chosen)
        if self.last_from is not None and length - 1 >= self.last_from:
            ranges.append((length - 1, length))
        return clip(merge(ranges), length)
