"""Positions as written into positions as counted, for one prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.spec.fields import at
from midstream.spec.positions import Item, Positions, Span
from midstream.spec.ranges import Range, Ranges, merge

# A span with a step makes one range of each position: the most ranges in one plan.
MAX_RANGES = 1 << 16

_NEVER_FED = "the last sampled token is never fed back, so it has no row"


def select(
    positions: Positions, prompt_len: int, max_tokens: int | None
) -> tuple[Ranges, int | None]:
    """The positions that are known now, and `last_from` (see ResolvedCapture) if "last" is asked.

    Args:
        positions: as written.
        prompt_len: P, at least 1.
        max_tokens: most tokens that may be generated, at least 1; None: unknown.

    Raises:
        SpecError: an int or span that selects nothing, or a selection that is empty. The path is
            relative to the value that has the field `positions`.
    """
    return _Selector(positions, prompt_len, max_tokens).select()


@dataclass(frozen=True, slots=True)
class _Selector:
    positions: Positions
    prompt_len: int
    max_tokens: int | None

    @property
    def rows(self) -> int | None:
        """Most rows that there may be."""
        return None if self.max_tokens is None else self.prompt_len + self.max_tokens - 1

    @property
    def window(self) -> Range:
        """The positions of the phase."""
        return {
            "all": (0, None),
            "prompt": (0, self.prompt_len),
            "generated": (self.prompt_len, None),
        }[self.positions.phase]

    def select(self) -> tuple[Ranges, int | None]:
        found: list[Range] = []
        last_from = None
        for index, item in enumerate(self.positions.include):
            if item == "last":
                last_from = max(self.prompt_len - 1, self.window[0])
                continue
            with at(self.positions.path(index)):
                found.extend(self._item(item, MAX_RANGES - len(found)))
        ranges = merge(self._within(found))
        if last_from is not None and self.rows is not None and last_from >= self.rows:
            last_from = None
        if not ranges and last_from is None:
            raise SpecError("positions", self._why_empty())
        return ranges, last_from

    def _item(self, item: Item, room: int) -> list[Range]:
        if isinstance(item, str):
            return [self._word(item)]
        if isinstance(item, int):
            return [self._int(item)]
        if item.step == 1:
            return [self._bounds(item)]
        chosen = self._stepped(item)
        if len(chosen) > room:
            raise SpecError(
                "",
                f"the span {item} selects {len(chosen)} single positions, and a plan has room for "
                f"{MAX_RANGES}; use a step of 1, or a nearer stop",
            )
        return [(position, position + 1) for position in chosen]

    def _word(self, word: str) -> Range:
        end = self.prompt_len
        return {
            "all": (0, None),
            "prompt": (0, end),
            "generated": (end, None),
            "last_prompt": (end - 1, end),
        }[word]

    def _int(self, position: int) -> Range:
        found = position + self.prompt_len if position < 0 else position
        if found < 0 or (self.rows is not None and found >= self.rows):
            limit = "up" if self.rows is None else f"to {self.rows - 1}"
            why = f"; {_NEVER_FED}" if found == self.rows else ""
            raise SpecError(
                "",
                f"position {position} is out of range: {self._lengths()}, so positions go from "
                f"{-self.prompt_len} {limit}{why}",
            )
        return (found, found + 1)

    def _bounds(self, span: Span) -> Range:
        """The span's bounds counted from 0, the stop no further than the most rows if known."""
        start = self._from_zero(span.start)
        stop = None if span.stop is None else self._from_zero(span.stop)
        end = _least(stop, self.rows)
        if end is not None and start >= end:
            raise SpecError("", f"the span {span} selects nothing: {self._lengths()}")
        return (start, stop)

    def _from_zero(self, bound: int) -> int:
        return bound if bound >= 0 else max(0, self.prompt_len + bound)

    def _stepped(self, span: Span) -> range:
        start, stop = self._bounds(span)
        low, high = self.window
        end = _least(_least(stop, self.rows), high)
        if end is None:
            raise SpecError(
                "",
                f"the span {span} needs a stop: it has a step, and no max_tokens says how far the "
                "request goes",
            )
        # The first of the span's own steps that is in the phase.
        skipped = max(0, -(-(low - start) // span.step))
        return range(start + skipped * span.step, end, span.step)

    def _within(self, ranges: Iterable[Range]) -> Iterable[Range]:
        """The parts of ranges that are in the phase and may come to be."""
        low, high = self.window
        for start, stop in ranges:
            first, end = max(start, low), _least(stop, high)
            reach = _least(end, self.rows)
            # A stop past the last row is kept: what is asked for does not depend on max_tokens.
            if reach is None or first < reach:
                yield (first, end)

    def _lengths(self) -> str:
        more = "" if self.max_tokens is None else f" and max_tokens is {self.max_tokens}"
        return f"the prompt has {self.prompt_len} tokens{more}"

    def _why_empty(self) -> str:
        problem = f"nothing is selected: {self._lengths()}"
        if self.positions.phase != "all":
            problem += f', and only tokens of phase "{self.positions.phase}" are meant'
        if self.max_tokens == 1:
            problem += f"; {_NEVER_FED}"
        return problem


def _least(one: int | None, other: int | None) -> int | None:
    """The smaller of two ends, where None is endless."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
