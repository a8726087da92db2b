"""Which positions of one request are meant, as far as its prompt tells.

What depends on a generated token's id is decided where that token is computed, and again in the
front end when all of them are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.spec.positions.ranges import Range, Ranges, clip, merge


@dataclass(frozen=True, slots=True)
class Match:
    """Generated tokens, by their ids.

    Attributes:
        ranges: where they may be; all at or past the prompt's end.
        ids: token ids, ascending, at least one.
        others: the tokens whose id is *not* among these.
    """

    ranges: Ranges
    ids: tuple[int, ...]
    others: bool = False


@dataclass(frozen=True, slots=True)
class Where:
    """A selection for one prompt.

    `ranges` and `matches` are disjoint: no position is in two of them. The final row, where
    `last_from` has it selected, may be in one of them as well.

    Attributes:
        ranges: positions that are selected whatever is generated.
        matches: generated tokens that are selected by their ids; at most two.
        last_from: where the request's final row may lie, if that is selected too: it is when its
            position is at least this. None: it is not. Captures and probes only.
    """

    ranges: Ranges
    matches: tuple[Match, ...] = ()
    last_from: int | None = None

    @property
    def num_ranges(self) -> int:
        """How many ranges it is made of."""
        return len(self.ranges) + sum(len(match.ranges) for match in self.matches)

    @property
    def possible(self) -> Ranges:
        """Every position that may turn out to be selected."""
        found = [*self.ranges, *(each for match in self.matches for each in match.ranges)]
        if self.last_from is not None:
            found.append((self.last_from, None))
        return merge(found)

    def final(self, length: int, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The positions selected of a request that ended.

        Args:
            length: its rows, P + G − 1.
            tokens: the id of the token at each position below `length`; only generated ones are
                looked at, and only where there are `matches`.
        """
        found: list[Range] = list(self.ranges)
        for match in self.matches:
            ids = frozenset(match.ids)
            for start, stop in clip(match.ranges, length):
                found.extend(
                    (position, position + 1)
                    for position in range(start, stop)
                    if (tokens[position] in ids) != match.others
                )
        if self.last_from is not None and length - 1 >= self.last_from:
            found.append((length - 1, length))
        return clip(merge(found), length)
