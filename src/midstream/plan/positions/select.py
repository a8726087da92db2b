"""Selection of positions in one prompt: from `Positions` to `Where`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from midstream.errors import NothingSelectedError, SpecError
from midstream.plan.positions.automaton import Automaton, Started, automaton_of, listed
from midstream.plan.positions.items import Between, Item, TokenIds
from midstream.plan.positions.locate import MAX_RANGES, NEVER_FED, Locator
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.range_set import intersect, least, subtract
from midstream.plan.positions.ranges import Range, Ranges, merge
from midstream.plan.positions.work import WorkBudget
from midstream.validation import at

EVERYTHING = Positions("all")

__all__ = ["MAX_RANGES", "PromptSelections", "in_listed_order", "select"]


def select(
    positions: Positions,
    prompt: Prompt,
    max_tokens: int | None,
    budget: WorkBudget | None = None,
) -> Where:
    """Return the positions selected in a prompt: (include − exclude) within the phase.

    Of the prompt the length is enough unless `positions.needs_prompt`. The result depends on
    `max_tokens` in one way: ranges entirely past the last possible row are dropped.
    """
    locator = Locator(prompt, max_tokens, positions.phase, budget or WorkBudget())
    return _Selector(positions, locator).select()


class PromptSelections:
    """The selections of one plan in one prompt: equal ones are located once, with one budget."""

    def __init__(self, prompt: Prompt, max_tokens: int | None) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self._budget = WorkBudget()
        self._known: dict[Positions, Where] = {}

    def select(self, positions: Positions) -> Where:
        """Return the positions selected in the prompt; see `select`."""
        if positions == EVERYTHING:
            return Where(((0, None),))
        where = self._known.get(positions)
        if where is None:
            # Edits at many layers usually select the same tokens.
            where = select(positions, self.prompt, self.max_tokens, self._budget)
            self._known[positions] = where
        return where


def in_listed_order(
    positions: Positions, prompt: Prompt, max_tokens: int | None, most: int
) -> list[int]:
    """Return the selected positions item by item, in the order of `include`, some twice."""
    selector = _Selector(positions, Locator(prompt, max_tokens, positions.phase))
    return selector.in_listed_order(most)


@dataclass(frozen=True, slots=True)
class _Located:
    """The items of `include` or `exclude`: ranges of those that do not depend on generated tokens,
    and what the others, TokenIds and Between, select in the prompt and after it.
    """

    ranges: Ranges
    prompt: Ranges
    ids: frozenset[int]
    marks: tuple[Started, ...]


@dataclass(frozen=True, slots=True)
class _Selector:
    positions: Positions
    locator: Locator

    def select(self) -> Where:
        return self._where(self._included())

    def in_listed_order(self, most: int) -> list[int]:
        ranges = self._where(self._included()).ranges
        starts = [start for start, _ in ranges]
        positions: list[int] = []
        for start, stop in self._by_item():
            for place in range(max(0, bisect_right(starts, start) - 1), len(ranges)):
                first, end = ranges[place]
                assert end is not None
                if stop is not None and first >= stop:
                    break
                positions += range(max(start, first), least(stop, end) or 0)[
                    : most - len(positions)
                ]
                if len(positions) == most:
                    return positions
        return positions

    def _by_item(self) -> Iterator[Range]:
        """Yield the ranges of each item in turn; those of one ascend. All can be located."""
        for item in self.positions.include:
            if isinstance(item, TokenIds):
                if self.positions.phase != "generated":
                    yield from merge(self.locator.token_ranges(item.ids))
            elif isinstance(item, Between):
                yield from self.locator.between(item)[0]
            elif item != "last_row":
                yield from merge(self.locator.find(item, MAX_RANGES).ranges)

    def _included(self) -> _Located:
        positions = self.positions
        return self._locate(positions.include, positions.path, strict=True)

    def _where(self, included: _Located) -> Where:
        positions = self.positions
        excluded = self._locate(positions.exclude, positions.exclude_path, strict=False)
        prompt_part = self._prompt_part(included, excluded)
        generated_part, matches = self._generated_part(included, excluded)
        ranges = self._reachable(merge((*prompt_part, *generated_part)))
        last_from = self._last_from(ranges)
        if not ranges and not matches and last_from is None:
            raise NothingSelectedError("positions", self._why_empty())
        where = Where(ranges, matches, last_from)
        if where.num_ranges > MAX_RANGES:
            raise SpecError(
                "positions",
                f"{where.num_ranges} separate ranges of positions are selected, more than the "
                f"limit of {MAX_RANGES} per plan",
            )
        return where

    def _locate(self, items: Iterable[Item], path: Callable[[int], str], strict: bool) -> _Located:
        """Locate items; if strict, one that selects nothing is an error."""
        ranges: list[Range] = []
        ids: set[int] = set()
        marks: list[Started] = []
        by_marks: list[Range] = []
        in_prompt = self.positions.phase != "generated"
        for index, item in enumerate(items):
            if item == "last_row":
                continue
            with at(path(index)):
                if isinstance(item, TokenIds):
                    ids.update(item.ids)
                    if in_prompt:
                        self.locator.check_ids()
                    continue
                if isinstance(item, Between):
                    in_marks, started = self.locator.between(item)
                    by_marks += in_marks
                    marks.append(started)
                    continue
                here = self.locator.find(item, MAX_RANGES - len(ranges))
                if strict and not here.ranges and here.nothing:
                    raise NothingSelectedError("", here.nothing)
                ranges.extend(here.ranges)
        by_id: Ranges = ()
        if ids and in_prompt:
            with at(path(0).partition("[")[0]):
                by_id = self.locator.token_ranges(ids)
        return _Located(merge(ranges), merge((*by_id, *by_marks)), frozenset(ids), tuple(marks))

    def _prompt_part(self, included: _Located, excluded: _Located) -> Ranges:
        if self.positions.phase == "generated":
            return ()
        wanted = merge((*included.ranges, *included.prompt))
        unwanted = merge((*excluded.ranges, *excluded.prompt))
        return intersect(subtract(wanted, unwanted), ((0, self.locator.prompt.length),))

    def _generated_part(
        self, included: _Located, excluded: _Located
    ) -> tuple[Ranges, tuple[Match, ...]]:
        """Return the generated tokens selected by position alone, and those by tokens."""
        if self.positions.phase == "prompt":
            return (), ()
        allowed = subtract(((self.locator.prompt.length, None),), excluded.ranges)
        wanted = intersect(included.ranges, allowed)
        if included.marks or excluded.marks:
            with at("positions"):
                return self._marked_part(included, excluded, wanted, allowed)
        matches = []
        if excluded.ids:
            matches.append(Match(self._reachable(wanted), tuple(sorted(excluded.ids)), others=True))
            by_position: Ranges = ()
        else:
            by_position = wanted
        ids = included.ids - excluded.ids
        if ids:
            rest = self._reachable(subtract(allowed, included.ranges))
            matches.append(Match(rest, tuple(sorted(ids))))
        return by_position, tuple(match for match in matches if match.ranges)

    def _marked_part(
        self, included: _Located, excluded: _Located, wanted: Ranges, allowed: Ranges
    ) -> tuple[Ranges, tuple[Match, ...]]:
        """Return the same as `_generated_part`, for positions with marks."""
        start = self.locator.prompt.length
        without = [*listed(excluded.ids), *excluded.marks]
        chosen = [*listed(included.ids), *included.marks]
        ids = included.ids | excluded.ids
        self.locator.budget.match(len(ids) * (len(without) + len(chosen) - 1))
        matches = []
        if without:
            others = self._automaton(start, None, without)
            matches.append(Match(self._reachable(wanted), automaton=others))
        if chosen:
            rest = self._reachable(subtract(allowed, included.ranges))
            matches.append(Match(rest, automaton=self._automaton(start, chosen, without)))
        by_position = () if without else wanted
        return by_position, tuple(match for match in matches if match.ranges)

    def _automaton(
        self, start: int, included: list[Started] | None, excluded: list[Started]
    ) -> Automaton:
        automaton = automaton_of(start, included, excluded)
        self.locator.budget.match(len(automaton.moves) * len(automaton.moves[0]))
        return automaton

    def _reachable(self, ranges: Ranges) -> Ranges:
        """Return, unclipped, the ranges that max_tokens lets the request reach in part."""
        rows = self.locator.rows
        return ranges if rows is None else tuple(span for span in ranges if span[0] < rows)

    def _last_from(self, ranges: Ranges) -> int | None:
        if "last_row" not in self.positions.include:
            return None
        position = max(self.locator.prompt.length - 1, self.locator.phase_range[0])
        if self.locator.rows is not None and position >= self.locator.rows:
            return None
        # The final row is already selected if all rows from `position` on are.
        if ranges and ranges[-1][1] is None and ranges[-1][0] <= position:
            return None
        return position

    def _why_empty(self) -> str:
        problem = f"nothing is selected: {self.locator.lengths}"
        if self.positions.phase != "all":
            problem += f', and `phase` selects only tokens of phase "{self.positions.phase}"'
        if self.positions.exclude:
            problem += ", and `exclude` removes all of them"
        elif any(isinstance(item, TokenIds) for item in self.positions.include):
            problem += ", and none of the token ids occurs"
        elif any(isinstance(item, Between) for item in self.positions.include):
            problem += ", and no token lies between the marks"
        if self.locator.max_tokens == 1:
            problem += f"; {NEVER_FED}"
        return problem
