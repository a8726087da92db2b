"""Which positions of a request, as written: before its prompt's length is known.

A position is the index of a token in its request, prompt first, from 0. With P prompt tokens and G
generated ones there are rows at 0 … P + G − 2: the last sampled token is never fed back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.spec.fields import (
    MAX_ITEMS,
    at,
    is_int,
    kind,
    listed,
    read_fields,
    read_int,
    read_word,
    show,
)

Phase = Literal["all", "prompt", "generated"]

WORDS = ("all", "prompt", "generated", "last_prompt", "last")
PHASES = ("all", "prompt", "generated")


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start, start + step, … below `stop`, as a Python slice selects them.

    Attributes:
        start: negative counts back from the prompt's end, and stops at 0. None is 0.
        stop: likewise; None is the end of the request, generated tokens included.
        step: at least 1. None is 1.

    Raises:
        SpecError: a step below 1, or a span that is empty whatever the prompt's length.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        for name, default in (("start", 0), ("stop", None), ("step", 1)):
            value = getattr(self, name)
            with at(name):
                object.__setattr__(self, name, default if value is None else read_int(value))
        if self.step < 1:
            raise SpecError("step", f"expected a step of at least 1, got {self.step}")
        if self.stop is None:
            return
        # A start counted from the prompt's end may lie anywhere below a stop counted from 0, and
        # the other way round.
        same_origin = (self.start < 0) == (self.stop < 0)
        if self.stop == 0 or (same_origin and self.start >= self.stop):
            raise SpecError("", f"the span {self} is empty for every prompt")

    def emit(self) -> dict[str, object]:
        """The JSON form, which Positions reads back."""
        return {"slice": [self.start, self.stop, self.step]}

    def __str__(self) -> str:
        stop = "" if self.stop is None else self.stop
        return f"{self.start}:{stop}" + (f":{self.step}" if self.step != 1 else "")


Item = str | int | Span


@dataclass(frozen=True, slots=True, init=False)
class Positions:
    """The union of some selections, within one phase.

    Attributes:
        include: at least one of
            `"all"`; `"prompt"`, 0 … P − 1; `"generated"`, P …; `"last_prompt"`, P − 1;
            `"last"`, the final row, which is known only at the end;
            an int, where a negative one counts back from the prompt's end, so that it is known
            before anything is generated: −1 is the last prompt token, not the request's last;
            a Span.
        phase: "all", or the only tokens of the union that are meant: "prompt" or "generated".
    """

    include: tuple[Item, ...]
    phase: Phase

    def __init__(self, include: object = "all", phase: object = "all") -> None:
        """Reads one item or a list or tuple of them.

        Besides the forms above, a span may be a `slice`, a `range` or `{"slice": [start, stop,
        step]}`, whose last parts may be null or left out.

        Raises:
            SpecError: an item of another kind, the same item twice, none, a span that is always
                empty, or an item that has no token of the phase.
        """
        with at("phase"):
            word: Any = read_word(phase, PHASES)
        if isinstance(include, (list, tuple)):
            items = _read_items(include, word)
        else:
            items = (_read_item(include, word),)
        object.__setattr__(self, "include", items)
        object.__setattr__(self, "phase", word)

    @staticmethod
    def parse(value: object) -> Positions:
        """`value` as Positions, from anything that the constructor takes for `include`."""
        return value if isinstance(value, Positions) else Positions(value)

    @staticmethod
    def within(value: object, phase: object) -> Positions:
        """Positions from the two fields `positions` and `phase`, with errors under these names.

        Raises:
            SpecError: as the constructor; also if `value` is a Positions of another phase.
        """
        if not isinstance(value, Positions):
            try:
                return Positions(value, "all" if phase is None else phase)
            except SpecError as error:
                raise error if error.path == "phase" else error.under("positions") from None
        if phase is None:
            return value
        with at("phase"):
            word = read_word(phase, PHASES)
            if value.phase not in ("all", word):
                raise SpecError(
                    "", f'"{word}" contradicts the positions\' own phase, "{value.phase}"'
                )
        return Positions.within(list(value.include), word)

    def emit(self) -> list[object]:
        """The JSON form of `include`, which the constructor reads back."""
        return [item.emit() if isinstance(item, Span) else item for item in self.include]

    def path(self, index: int) -> str:
        """Where item `index` is, for messages: without an index if it is the only one."""
        return "positions" if len(self.include) == 1 else f"positions[{index}]"


def _read_items(values: list[Any] | tuple[Any, ...], phase: str) -> tuple[Item, ...]:
    if not values:
        raise SpecError("", 'expected at least one position; use "all" for all')
    if len(values) > MAX_ITEMS:
        raise SpecError(
            "", f"at most {MAX_ITEMS} items can be listed, got {len(values)}; use slices"
        )
    found: dict[Item, None] = {}
    for index, value in enumerate(values):
        with at(f"[{index}]"):
            item = _read_item(value, phase)
            if item in found:
                shown = item if isinstance(item, Span) else show(item)
                raise SpecError("", f"{shown} is listed twice")
            found[item] = None
    return tuple(found)


def _read_item(value: object, phase: str) -> Item:
    item: Item
    if isinstance(value, str):
        item = read_word(value, WORDS)
    elif is_int(value):
        item = read_int(value)
    elif isinstance(value, Span):
        item = value
    elif isinstance(value, slice):
        item = Span(value.start, value.stop, value.step)
    elif isinstance(value, range):
        item = _span_of_range(value)
    elif isinstance(value, Mapping):
        item = _span_of_dict(value)
    else:
        raise SpecError(
            "",
            f"expected one of {listed(WORDS)}, an `int`, a slice or a list of these, "
            f"got {kind(value)}",
        )
    if not _meets(item, phase):
        shown = item if isinstance(item, Span) else show(item)
        raise SpecError("", f'{shown} never has a token of phase "{phase}"')
    return item


def _span_of_range(value: range) -> Span:
    if not value:
        raise SpecError("", f"{_show_range(value)} is empty")
    # A range means just these ints; a slice from −3 to 0 does not.
    if value.start < 0 <= value.stop:
        raise SpecError(
            "",
            f"{_show_range(value)} counts from the prompt's end and from its start; list the "
            'positions, or use slice(-n, None) and phase="prompt"',
        )
    return Span(value.start, value.stop, value.step)


def _show_range(value: range) -> str:
    """A range for messages."""
    return f"range({show(value.start)}, {show(value.stop)}, {show(value.step)})"


def _span_of_dict(value: Mapping[Any, Any]) -> Span:
    parts = read_fields(value, required=("slice",))["slice"]
    with at("slice"):
        if not isinstance(parts, (list, tuple)):
            raise SpecError("", f"expected [start, stop, step], got {kind(parts)}")
        if not 1 <= len(parts) <= 3:
            raise SpecError("", f"expected 1 to 3 parts, start, stop, step, got {len(parts)}")
    try:
        return Span(*parts)
    except SpecError as error:
        place = {"start": "slice[0]", "stop": "slice[1]", "step": "slice[2]", "": "slice"}
        raise SpecError(place[error.path], error.problem) from None


def _meets(item: Item, phase: str) -> bool:
    """Whether there is a prompt for which the item has a token of the phase."""
    if phase == "prompt":
        return item not in ("generated", "last")
    if phase == "generated":
        if isinstance(item, Span):
            # A start at or before the prompt's end: with one prompt token, the next is at `step`.
            stop = item.stop
            return stop is None or (stop > 0 and (item.start >= 1 or stop > item.step))
        if isinstance(item, int):
            return item >= 1
        return item not in ("prompt", "last_prompt")
    return True
