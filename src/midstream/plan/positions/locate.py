"""Locator of one item of a selection within one prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from midstream.errors import SpecError
from midstream.plan.positions.automaton import Marks, Started
from midstream.plan.positions.items import Between, Item, Mark, Media, Role, Span, Text, Window
from midstream.plan.positions.prompt import Message, Prompt
from midstream.plan.positions.range_set import least
from midstream.plan.positions.ranges import Range, Ranges
from midstream.plan.positions.work import WorkBudget
from midstream.validation import at, show

# Maximum number of ranges in one plan. A span with a step takes one range per position.
MAX_RANGES = 1 << 16

NEVER_FED = "the last sampled token is never fed back, so it has no activations"

_SHOWN_ROLES = 8


@dataclass(frozen=True, slots=True)
class Found:
    """The ranges that an item selects, in any order, maybe beyond the phase; or why none."""

    ranges: tuple[Range, ...]
    nothing: str = ""


@dataclass(frozen=True, slots=True)
class Locator:
    """Locates items in one prompt; spans with a step only within the phase."""

    prompt: Prompt
    max_tokens: int | None
    phase: str
    budget: WorkBudget = field(default_factory=WorkBudget)

    @property
    def rows(self) -> int | None:
        """Maximum number of rows of the request; None: unknown."""
        return None if self.max_tokens is None else self.prompt.length + self.max_tokens - 1

    @property
    def phase_range(self) -> Range:
        """The positions of the phase."""
        length = self.prompt.length
        return {"all": (0, None), "prompt": (0, length), "generated": (length, None)}[self.phase]

    @property
    def lengths(self) -> str:
        """The prompt's length and max_tokens, for messages."""
        more = "" if self.max_tokens is None else f" and max_tokens is {self.max_tokens}"
        return f"the prompt has {self.prompt.length} tokens{more}"

    def find(self, item: Item, max_ranges: int) -> Found:
        """Return the ranges of an item, at most so many."""
        if isinstance(item, str):
            end = self.prompt.length
            words = {
                "all": (0, None),
                "prompt": (0, end),
                "generated": (end, None),
                "last_prompt": (end - 1, end),
            }
            return Found((words[item],))
        if isinstance(item, int):
            return self._int(item)
        if isinstance(item, (Span, Window)):
            return self._span(item, max_ranges)
        if isinstance(item, Text):
            return self._text(item)
        if isinstance(item, Media):
            return self._media(item)
        assert isinstance(item, Role)
        return self._role(item)

    def check_ids(self) -> None:
        """Check that the prompt's tokens can be selected by their ids."""
        if self.prompt.token_ids is None:
            raise SpecError(
                "",
                "this prompt has no token ids, because it was not given as tokens; use "
                'phase="generated", or integer positions',
            )

    def token_ranges(self, ids: Iterable[int]) -> Ranges:
        """Return the positions of the prompt's tokens with one of these ids."""
        index = self.prompt.token_index
        return () if index is None else index.find(ids, self.budget)

    def between(self, item: Between) -> tuple[Ranges, Started]:
        """Return the positions between two marks in the prompt, and what reads the tokens on."""
        tokens = self.prompt.token_ids
        if tokens is None:
            raise SpecError(
                "",
                "this prompt has no token ids, because it was not given as tokens, so it is "
                "unknown which marks it has; use token ids or integer positions",
            )
        marks = Marks(self._mark("start", item.start), self._mark("end", item.end))
        ranges, state = marks.read(tokens, self.token_ranges(marks.alphabet))
        self.budget.match(len(ranges))
        return ranges, (marks, state)

    def _mark(self, name: str, mark: Mark) -> tuple[int, ...] | None:
        """Return the token ids of a mark."""
        with at(name):
            if mark is None or (self.prompt.token_id is None and isinstance(mark, tuple)):
                return mark
            if self.prompt.token_id is None:
                raise SpecError("", "a text needs a tokenizer; give token ids")
            parts = [mark] if isinstance(mark, str) else mark
            return tuple(map(self.prompt.token_id, parts))

    def _int(self, position: int) -> Found:
        length, rows = self.prompt.length, self.rows
        index = position + length if position < 0 else position
        if index >= 0 and (rows is None or index < rows):
            return Found(((index, index + 1),))
        limit = "up" if rows is None else f"to {rows - 1}"
        why = f"; {NEVER_FED}" if index == rows else ""
        return Found(
            (),
            f"position {position} is out of range: {self.lengths}, so positions go from "
            f"{-length} {limit}{why}",
        )

    def _span(self, span: Span | Window, max_ranges: int) -> Found:
        start, stop = span.bounds(self.prompt.length)
        shown = f"the span {span}" if isinstance(span, Span) else str(span)
        end = least(stop, self.rows)
        if end is not None and start >= end:
            why = f"; {NEVER_FED}" if start == self.rows else ""
            return Found((), f"{shown} selects nothing: {self.lengths}{why}")
        if span.step == 1:
            return Found(((start, stop),))
        chosen = self._steps(shown, start, end, span.step)
        if len(chosen) > max_ranges:
            raise SpecError(
                "",
                f"{shown} selects {len(chosen)} separate positions, more than the limit of "
                f"{MAX_RANGES} ranges per plan; use a step of 1, or a smaller stop",
            )
        self.budget.match(len(chosen))
        return Found(tuple((position, position + 1) for position in chosen))

    def _steps(self, shown: str, start: int, end: int | None, step: int) -> range:
        """Return the positions start, start + step, … below `end` that are in the phase."""
        low, high = self.phase_range
        end = least(end, high)
        if end is None:
            raise SpecError(
                "",
                f"{shown} needs a stop: it has a step, and max_tokens is not set",
            )
        # Start at the first of the span's steps within the phase.
        skipped = max(0, -(-(low - start) // step))
        return range(start + skipped * step, end, step)

    def _text(self, item: Text) -> Found:
        known = self.prompt.text_map
        if known is None:
            raise SpecError(
                "", "this prompt has no text to search; use token ids or integer positions"
            )
        numbers = known.index.find(item.text, self.budget)
        count = len(numbers)
        if not count:
            around = known.around(item.text)
            if around is None:
                return Found((), f"the prompt does not contain {show(item.text)}")
            return Found(
                (),
                f"{show(item.text)} is in the prompt, but not at token boundaries; the tokens "
                f"there: {_show_tokens(around)}",
            )
        if item.occurrence != "all":
            if not -count <= item.occurrence < count:
                what = f"the prompt has {count} of {show(item.text)}"
                return _out_of_range(f"occurrence {item.occurrence}", what, count)
            numbers = numbers[[item.occurrence]]
        return Found(known.index.ranges(numbers, len(item.text)))

    def _role(self, item: Role) -> Found:
        known = self.prompt.roles
        if known is None:
            raise SpecError(
                "",
                "Role requires a prompt made from chat messages; use chat() instead of "
                "generate(), or select by text or integer positions",
            )
        of_role = known.get(item.role)
        if not of_role:
            roles = [show(role) for role in islice(known, _SHOWN_ROLES)]
            more = ", …" if len(known) > _SHOWN_ROLES else ""
            return Found(
                (),
                f"the chat has no message of role {show(item.role)}; its roles: "
                f"{', '.join(roles)}{more}",
            )
        count = len(of_role)
        if item.message != "all":
            if not -count <= item.message < count:
                what = f"the chat has {count} of role {show(item.role)}"
                return _out_of_range(f"message {item.message}", what, count)
            of_role = [of_role[item.message]]
        self.budget.match(len(of_role))
        ranges = tuple(content for message in of_role for content in _content(message))
        return Found(ranges, "" if ranges else f"{item}: the message has no content in the prompt")

    def _media(self, item: Media) -> Found:
        of_kind = [media for media in self.prompt.media if media.kind == item.kind]
        count = len(of_kind)
        if not count:
            others = ", ".join(sorted({media.kind for media in self.prompt.media}))
            has = f"; it has {others}" if others else ""
            return Found((), f"{item} selects nothing: the prompt has no {item.kind}{has}")
        if item.index != "all":
            if not -count <= item.index < count:
                what = f"the prompt has {count} of this kind"
                return _out_of_range(f"{item.kind} {item.index}", what, count)
            of_kind = [of_kind[item.index]]
        ranges = tuple(span for media in of_kind for span in media.ranges)
        self.budget.match(len(ranges))
        return Found(ranges, "" if ranges else f"{item}: none of its tokens holds an embedding")


def _out_of_range(item: str, there: str, count: int) -> Found:
    return Found(
        (),
        f"{item} is out of range: {there}, expected 0 to {count - 1} (or −{count} to −1)",
    )


def _content(message: Message) -> list[Range]:
    if message.problem is not None:
        raise SpecError("", f"the tokens of message {message.index} are unknown: {message.problem}")
    return [(message.start, message.stop)] if message.start < message.stop else []


def _show_tokens(texts: list[str]) -> str:
    """Return the texts of tokens for messages, at most 8."""
    shown = [show(text) for text in texts]
    if len(shown) > 8:
        shown = [*shown[:4], "…", *shown[-4:]]
    return " ".join(shown)
