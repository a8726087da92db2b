"""Positions as written into positions as counted, for one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from midstream.errors import NothingSelectedError, SpecError
from midstream.spec.positions.items import Item, TokenIds
from midstream.spec.positions.locate import MAX_RANGES, NEVER_FED, Locator
from midstream.spec.positions.position_set import Match, Where
from midstream.spec.positions.positions import Positions
from midstream.spec.positions.prompt import Prompt
from midstream.spec.positions.range_set import intersect, subtract
from midstream.spec.positions.ranges import Range, Ranges, merge
from midstream.validation import at

__all__ = ["MAX_RANGES", "select"]


def select(positions: Positions, prompt: Prompt, max_tokens: int | None) -> Where:
    """What is selected, for this prompt: (include − exclude) within the phase.

    Args:
        positions: as written.
        prompt: the prompt; its length is enough unless `positions.needs_prompt`.
        max_tokens: most tokens that may be generated, at least 1; None: unknown.

    Returns:
        The same for every `max_tokens` but for parts that would lie wholly past the last row,
        which are left out. For a prompt that is fully known only tokens yet to be generated are
        left to `matches`.

    Raises:
        SpecError: an item of `include` that selects nothing (words and token ids may), a
            selection that is empty, one of too many ranges, or an item that is found by what is
            not known of the prompt. The path is relative to the value that has the field
            `positions`.
    """
    return _Selector(positions, Locator(prompt, max_tokens, positions.phase)).select()


@dataclass(frozen=True, slots=True)
class _Named:
    """The items of one side: what is meant whatever is generated, and token ids.

    Attributes:
        ranges: by all but token ids; they may lie beyond the phase.
        prompt: the prompt's tokens with one of the ids.
        ids: of all TokenIds.
    """

    ranges: Ranges
    prompt: Ranges
    ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Selector:
    positions: Positions
    locator: Locator

    def select(self) -> Where:
        positions = self.positions
        included = self._named(positions.include, positions.path, strict=True)
        excluded = self._named(positions.exclude, positions.exclude_path, strict=False)
        certain = self._prompt_part(included, excluded)
        later, matches = self._generated_part(included, excluded)
        ranges = self._reachable(merge((*certain, *later)))
        last_from = self._last_from(ranges)
        if not ranges and not matches and last_from is None:
            raise NothingSelectedError("positions", self._why_empty())
        where = Where(ranges, matches, last_from)
        if where.num_ranges > MAX_RANGES:
            raise SpecError(
                "positions",
                f"{where.num_ranges} separate ranges of positions are selected, and a plan has "
                f"room for {MAX_RANGES}",
            )
        return where

    def _named(self, items: Iterable[Item], path: Callable[[int], str], strict: bool) -> _Named:
        """Args: `strict`: whether an item that selects nothing is an error."""
        found: list[Range] = []
        by_id: list[Range] = []
        ids: set[int] = set()
        for index, item in enumerate(items):
            if item == "last":
                continue
            with at(path(index)):
                if isinstance(item, TokenIds):
                    ids.update(item.ids)
                    if self.positions.phase != "generated":
                        by_id.extend(self.locator.token_ranges(item.ids))
                    continue
                here = self.locator.find(item, MAX_RANGES - len(found))
                if strict and not here.ranges and here.nothing:
                    raise NothingSelectedError("", here.nothing)
                found.extend(here.ranges)
        return _Named(merge(found), merge(by_id), frozenset(ids))

    def _prompt_part(self, included: _Named, excluded: _Named) -> Ranges:
        if self.positions.phase == "generated":
            return ()
        meant = merge((*included.ranges, *included.prompt))
        left_out = merge((*excluded.ranges, *excluded.prompt))
        return intersect(subtract(meant, left_out), ((0, self.locator.prompt.length),))

    def _generated_part(
        self, included: _Named, excluded: _Named
    ) -> tuple[Ranges, tuple[Match, ...]]:
        """Tokens selected whatever their ids, and by their ids."""
        if self.positions.phase == "prompt":
            return (), ()
        allowed = subtract(((self.locator.prompt.length, None),), excluded.ranges)
        meant = intersect(included.ranges, allowed)
        matches = []
        if excluded.ids:
            matches.append(Match(self._reachable(meant), tuple(sorted(excluded.ids)), others=True))
            certain: Ranges = ()
        else:
            certain = meant
        ids = included.ids - excluded.ids
        if ids:
            rest = self._reachable(subtract(allowed, included.ranges))
            matches.append(Match(rest, tuple(sorted(ids))))
        return certain, tuple(match for match in matches if match.ranges)

    def _reachable(self, ranges: Ranges) -> Ranges:
        """The ranges of which a part may come to be, in full: what is asked for does not depend on
        max_tokens."""
        rows = self.locator.rows
        return ranges if rows is None else tuple(each for each in ranges if each[0] < rows)

    def _last_from(self, ranges: Ranges) -> int | None:
        if "last" not in self.positions.include:
            return None
        found = max(self.locator.prompt.length - 1, self.locator.phase_range[0])
        if self.locator.rows is not None and found >= self.locator.rows:
            return None
        # The final row is selected already where all rows from here on are.
        if ranges and ranges[-1][1] is None and ranges[-1][0] <= found:
            return None
        return found

    def _why_empty(self) -> str:
        problem = f"nothing is selected: {self.locator.lengths}"
        if self.positions.phase != "all":
            problem += f', and only tokens of phase "{self.positions.phase}" are meant'
        if self.positions.exclude:
            problem += ", and `exclude` leaves none of them"
        elif any(isinstance(item, TokenIds) for item in self.positions.include):
            problem += ", and none of the token ids is there"
        if self.locator.max_tokens == 1:
            problem += f"; {NEVER_FED}"
        return problem
