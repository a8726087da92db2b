"""Which positions of a request, as written: before its prompt is known.

A position is the index of a token in its request, prompt first, from 0. With P prompt tokens and G
generated ones there are rows at 0 … P + G − 2: the last sampled token is never fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.spec.positions.item_parser import read_item, read_items
from midstream.spec.positions.items import Item, Role, Span, Text, TokenIds, Window
from midstream.validation import at, read_word

__all__ = ["PHASES", "Item", "Phase", "Positions", "Role", "Span", "Text", "TokenIds", "Window"]

Phase = Literal["all", "prompt", "generated"]

WORDS = ("all", "prompt", "generated", "last_prompt", "last")
EXCLUDE_WORDS = ("prompt", "generated", "last_prompt")
PHASES = ("all", "prompt", "generated")


@dataclass(frozen=True, slots=True, init=False)
class Positions:
    """The union of some selections, less the union of others, within one phase.

    Attributes:
        include: at least one of
            `"all"`; `"prompt"`, 0 … P − 1; `"generated"`, P …; `"last_prompt"`, P − 1;
            `"last"`, the final row, which is known only at the end;
            an int, where a negative one counts back from the prompt's end, so that it is known
            before anything is generated: −1 is the last prompt token, not the request's last;
            a Span; a Window; TokenIds; a Text; a Role.
        phase: "all", or the only tokens that are meant: "prompt" or "generated".
        exclude: the same kinds of items, but for "all" and "last"; none: nothing is left out.
            Not together with `"last"` in `include`: whether the final row is left out would be
            known only when it is computed.
    """

    include: tuple[Item, ...]
    phase: Phase
    exclude: tuple[Item, ...]

    def __init__(
        self, include: object = "all", phase: object = "all", exclude: object = ()
    ) -> None:
        """Reads one item or a list or tuple of them, for `include` and for `exclude`.

        Besides the forms above, a span may be a `slice`, a `range` or `{"slice": [start, stop,
        step]}`, whose last parts may be null or left out. The other kinds have JSON forms as
        well: `{"window": [start, stop, step]}` (the step may be left out), `{"tokens": [id, …]}`,
        `{"text": "…", "occurrence": "all"}`, `{"role": "user", "message": -1}`.

        Raises:
            SpecError: an item of another kind, the same item twice, none in `include`, an item
                that is always empty or has no token of the phase, or an `exclude` with `"last"`.
                The path is that within `include`, or begins with `phase` or `exclude`.
        """
        with at("phase"):
            word: Any = read_word(phase, PHASES)
        items = _read_include(include, word)
        with at("exclude"):
            left_out = _read_exclude(exclude, word)
            if left_out and "last" in items:
                raise SpecError("", _LAST_WITH_EXCLUDE)
        object.__setattr__(self, "include", items)
        object.__setattr__(self, "phase", word)
        object.__setattr__(self, "exclude", left_out)

    @staticmethod
    def parse(value: object) -> Positions:
        """`value` as Positions, from anything that the constructor takes for `include`."""
        return value if isinstance(value, Positions) else Positions(value)

    @staticmethod
    def within(value: object, phase: object, exclude: object = None) -> Positions:
        """Positions from the fields `positions`, `phase` and `exclude`, named so in errors.

        Args:
            value: a Positions, or what the constructor takes for `include`.
            phase: None: not given.
            exclude: None: not given.

        Raises:
            SpecError: as the constructor; also if `value` is a Positions of another phase, or
                has an `exclude` of its own and another is given.
        """
        if isinstance(value, Positions):
            return _narrowed(value, phase, exclude)
        if phase is None:
            phase = "all"
        with at("phase"):
            word = read_word(phase, PHASES)
        # Read by itself first, so that an error within it is one of `positions`.
        with at("positions"):
            items = _read_include(value, word)
        return Positions(items, word, () if exclude is None else exclude)

    @property
    def needs_prompt(self) -> bool:
        """Whether what is selected depends on more of the prompt than its length."""
        return any(
            isinstance(item, (Text, Role))
            or (isinstance(item, TokenIds) and self.phase != "generated")
            for item in (*self.include, *self.exclude)
        )

    def emit(self) -> list[object]:
        """The JSON form of `include`, which the constructor reads back."""
        return _emit(self.include)

    def emit_exclude(self) -> list[object]:
        """The JSON form of `exclude`, which the constructor reads back; empty if there is none."""
        return _emit(self.exclude)

    def to_dict(self) -> dict[str, object]:
        """The JSON form as the fields `positions`, `phase` and, if there is any, `exclude`."""
        found: dict[str, object] = {"positions": self.emit(), "phase": self.phase}
        if self.exclude:
            found["exclude"] = self.emit_exclude()
        return found

    def path(self, index: int) -> str:
        """Where item `index` is, for messages: without an index if it is the only one."""
        return "positions" if len(self.include) == 1 else f"positions[{index}]"

    def exclude_path(self, index: int) -> str:
        """Where item `index` of `exclude` is, for messages: without an index if the only one."""
        return "exclude" if len(self.exclude) == 1 else f"exclude[{index}]"


_LAST_WITH_EXCLUDE = (
    '"last" cannot be in a selection that leaves something out; ask for "last" in a capture or '
    "probe of its own"
)


def _narrowed(value: Positions, phase: object, exclude: object) -> Positions:
    """The same with a phase and an exclude from beside it, unless they contradict its own."""
    word: str = value.phase
    if phase is not None:
        with at("phase"):
            word = read_word(phase, PHASES)
            if value.phase not in ("all", word):
                raise SpecError(
                    "", f'"{word}" contradicts the positions\' own phase, "{value.phase}"'
                )
    left_out = value.exclude
    if exclude is not None:
        with at("exclude"):
            given = _read_exclude(exclude, word)
            if left_out and set(given) != set(left_out):
                raise SpecError("", "the positions have an exclude of their own; give only one")
        left_out = given
    if (word, left_out) == (value.phase, value.exclude):
        return value
    return Positions.within(list(value.include), word, left_out)


def _read_include(value: object, phase: str) -> tuple[Item, ...]:
    if not isinstance(value, (list, tuple)):
        return (read_item(value, phase, WORDS),)
    if not value:
        raise SpecError("", 'expected at least one position; use "all" for all')
    return read_items(value, phase, WORDS)


def _read_exclude(value: object, phase: str) -> tuple[Item, ...]:
    if not isinstance(value, (list, tuple)):
        return (read_item(value, phase, EXCLUDE_WORDS),)
    return read_items(value, phase, EXCLUDE_WORDS)


def _emit(items: tuple[Item, ...]) -> list[object]:
    return [item if isinstance(item, (str, int)) else item.emit() for item in items]
