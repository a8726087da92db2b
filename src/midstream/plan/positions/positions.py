"""`Positions`: a selection of token positions, before the prompt is known.

A position is the index of a token in its request, from 0. The last sampled token has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields
from midstream.plan.positions.item_parser import read_item, read_items
from midstream.plan.positions.items import (
    IN_PROMPT,
    Between,
    Item,
    Media,
    Role,
    Span,
    Text,
    TokenIds,
    Window,
)
from midstream.validation import as_list, at, read_word

__all__ = [
    "PHASES",
    "Between",
    "Item",
    "Media",
    "Phase",
    "Positions",
    "Role",
    "Span",
    "Text",
    "TokenIds",
    "Window",
]

Phase = Literal["all", "prompt", "generated"]

WORDS = ("all", "prompt", "generated", "last_prompt", "last_row")
EXCLUDE_WORDS = ("prompt", "generated", "last_prompt")
PHASES = ("all", "prompt", "generated")


@dataclass(frozen=True, slots=True, init=False)
class Positions(FrozenFields):
    """The union of the included items minus the union of the excluded ones, within one phase.

    Rows that a request returns are in the order of their positions, whatever the order of the
    items, and a position of several items has one row. Where each item is a single position (an
    int, `"last_prompt"` or `"last_row"`), captures and probes therefore reject a list that does not
    ascend, or that has a position twice. Rows that an edit is given, one for each position, go to
    the positions in the order of the items, those of one item ascending; no position may then be in
    two items.

    Attributes:
        include: at least one of
            `"all"`; `"prompt"`, 0 … P − 1; `"generated"`, P …; `"last_prompt"`, P − 1;
            `"last_row"`, the final row, with the tokens that are generated, known only when the
            request ends;
            an int; a negative one counts back from the prompt's end, so that it is known before
            generation: −1 is the last prompt token, not the request's last token;
            a Span; a Window; TokenIds; a Text; a Role; Media; Between two marks.
        phase: "all", or "prompt" or "generated" to select only such tokens.
        exclude: the same kinds of items, except "all" and "last_row"; may be empty. Must be empty
            if `include` has `"last_row"`: whether the final row is excluded would be known only
            when it is computed.
    """

    include: tuple[Item, ...]
    phase: Phase
    exclude: tuple[Item, ...]

    def __init__(
        self, include: object = "all", phase: object = "all", exclude: object = ()
    ) -> None:
        """Read one item, or a list or tuple of items, for `include` and for `exclude`.

        Besides the forms above, a span may be a `slice`, a `range` or `{"slice": [start, stop,
        step]}`, whose stop and step may be null or omitted. The other kinds have JSON forms as
        well: `{"window": [start, stop, step]}` (the step may be omitted), `{"tokens": [id, …]}`,
        `{"text": "…", "occurrence": "all"}`, `{"role": "user", "message": -1}`, `{"image": 0}`
        (or "all"; so for `audio` and `video`), `{"between": ["<think>", "</think>"]}`.

        Raises:
            SpecError: an item of another kind, a duplicate item, an empty `include`, an item that
                is always empty or cannot select a token of the phase, or an `exclude` together
                with `"last_row"`. The path is relative to `include`, or starts with `phase` or
                `exclude`.
        """
        with at("phase"):
            word: Any = read_word(phase, PHASES)
        items = _read_include(include, word)
        with at("exclude"):
            left_out = _read_exclude(exclude, word)
            if left_out and "last_row" in items:
                raise SpecError("", _LAST_WITH_EXCLUDE)
        self._set(include=items, phase=word, exclude=left_out)

    @staticmethod
    def parse(value: object) -> Positions:
        """Return a Positions, from a Positions or any form of the constructor's `include`."""
        return value if isinstance(value, Positions) else Positions(value)

    @staticmethod
    def within(value: object, phase: object, exclude: object = None) -> Positions:
        """Return Positions from the fields `positions`, `phase` and `exclude`; None: not given."""
        if isinstance(value, Positions):
            return _narrowed(value, phase, exclude)
        if phase is None:
            phase = "all"
        with at("phase"):
            word = read_word(phase, PHASES)
        # Read separately first, so that the path of an error starts with `positions`.
        with at("positions"):
            items = _read_include(value, word)
        return Positions(items, word, () if exclude is None else exclude)

    @property
    def needs_prompt(self) -> bool:
        """Whether the selection depends on more of the prompt than its length."""
        return any(
            isinstance(item, (*IN_PROMPT, Between))
            or (isinstance(item, TokenIds) and self.phase != "generated")
            for item in (*self.include, *self.exclude)
        )

    @property
    def has_marks(self) -> bool:
        return any(isinstance(item, Between) for item in (*self.include, *self.exclude))

    def emit(self) -> list[object]:
        """Return the JSON form of `include`, which the constructor reads."""
        return _emit(self.include)

    def emit_exclude(self) -> list[object]:
        """Return the JSON form of `exclude`, which the constructor reads; may be empty."""
        return _emit(self.exclude)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form: fields `positions`, `phase` and, if not empty, `exclude`."""
        fields: dict[str, object] = {"positions": self.emit(), "phase": self.phase}
        if self.exclude:
            fields["exclude"] = self.emit_exclude()
        return fields

    def path(self, index: int) -> str:
        """Return the error path of item `index`: without an index if it is the only item."""
        return "positions" if len(self.include) == 1 else f"positions[{index}]"

    def exclude_path(self, index: int) -> str:
        """Return the error path of `exclude`'s item `index`: no index if it is the only item."""
        return "exclude" if len(self.exclude) == 1 else f"exclude[{index}]"


_LAST_WITH_EXCLUDE = (
    '"last_row" cannot be combined with `exclude`; use a separate capture or probe for "last_row"'
)


def _narrowed(value: Positions, phase: object, exclude: object) -> Positions:
    """Return a copy with the phase and exclude fields applied."""
    word: str = value.phase
    if phase is not None:
        with at("phase"):
            word = read_word(phase, PHASES)
            if value.phase not in ("all", word):
                raise SpecError(
                    "", f'"{word}" contradicts the phase of the positions, "{value.phase}"'
                )
    left_out = value.exclude
    if exclude is not None:
        with at("exclude"):
            items = _read_exclude(exclude, word)
            if left_out and set(items) != set(left_out):
                raise SpecError("", "the positions already have an `exclude`; give only one")
        left_out = items
    if (word, left_out) == (value.phase, value.exclude):
        return value
    return Positions.within(list(value.include), word, left_out)


def _read_include(value: object, phase: str) -> tuple[Item, ...]:
    value = as_list(value)
    if not isinstance(value, (list, tuple)):
        return (read_item(value, phase, WORDS),)
    if not value:
        raise SpecError("", 'expected at least one position; use "all" for all positions')
    return read_items(value, phase, WORDS)


def _read_exclude(value: object, phase: str) -> tuple[Item, ...]:
    value = as_list(value)
    if not isinstance(value, (list, tuple)):
        return (read_item(value, phase, EXCLUDE_WORDS),)
    return read_items(value, phase, EXCLUDE_WORDS)


def _emit(items: tuple[Item, ...]) -> list[object]:
    return [item if isinstance(item, (str, int)) else item.emit() for item in items]
