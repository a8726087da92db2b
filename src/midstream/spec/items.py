"""The items that a selection of positions is made of, as values; words and ints are themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from midstream.errors import SpecError
from midstream.spec.fields import at, is_int, kind, read_int, show

# Limits on what one request may make us hold and look for; far above what anybody asks for.
MAX_IDS = 4096  # token ids in one selection
MAX_TEXT = 1 << 16  # characters of a text that is looked for
MAX_ROLE = 256  # characters of a role's name


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
        _check_step(self.step)
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

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Its start and stop, counted from 0, for a prompt of so many tokens."""
        start, stop = (
            bound if bound is None or bound >= 0 else max(0, prompt_len + bound)
            for bound in (self.start, self.stop)
        )
        return (start or 0, stop)

    def __str__(self) -> str:
        stop = "" if self.stop is None else self.stop
        return f"{self.start}:{stop}" + (f":{self.step}" if self.step != 1 else "")


@dataclass(frozen=True, slots=True)
class Window:
    """Positions around the prompt's end: P + start, P + start + step, … below P + stop.

    `Window(-5, 0)` is the last five tokens of the prompt, `Window(0, 10)` the first ten generated
    ones. What would lie before position 0 is left out; steps then count from 0.

    Attributes:
        start: tokens from the prompt's end; negative: before it.
        stop: likewise; None is the end of the request.
        step: at least 1.

    Raises:
        SpecError: a step below 1, or a window that is empty.
    """

    start: int
    stop: int | None
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "stop", "step"):
            value = getattr(self, name)
            if name == "stop" and value is None:
                continue
            with at(name):
                object.__setattr__(self, name, read_int(value))
        _check_step(self.step)
        if self.stop is not None and self.start >= self.stop:
            raise SpecError("", f"{self} is empty: the stop must be above the start")

    def emit(self) -> dict[str, object]:
        """The JSON form, which Positions reads back."""
        return {"window": [self.start, self.stop, self.step]}

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Its start and stop, counted from 0, for a prompt of so many tokens."""
        stop = None if self.stop is None else max(0, prompt_len + self.stop)
        return (max(0, prompt_len + self.start), stop)

    def __str__(self) -> str:
        step = f", {self.step}" if self.step != 1 else ""
        return f"Window({self.start}, {self.stop}{step})"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Every token with one of some ids, in the prompt and among those generated.

    Attributes:
        ids: 1 to 4096 different token ids, ascending; read from an int or a list in any order.

    Raises:
        SpecError: no id, too many, one that is listed twice, or one outside 0 … 2**31 − 1.
    """

    ids: tuple[int, ...]

    def __init__(self, ids: object) -> None:
        given = [ids] if is_int(ids) else ids
        if not isinstance(given, (list, tuple)):
            raise SpecError(
                "", f"expected a token id, an `int`, or a list of them, got {kind(ids)}"
            )
        if not 1 <= len(given) <= MAX_IDS:
            raise SpecError("", f"expected 1 to {MAX_IDS} token ids, got {len(given)}")
        found: set[int] = set()
        for index, value in enumerate(given):
            with at("" if given is not ids else f"[{index}]"):
                number = read_int(value)
                if not 0 <= number < 2**31:
                    raise SpecError("", f"expected a token id, 0 to 2**31 - 1, got {show(number)}")
                if number in found:
                    raise SpecError("", f"token id {number} is listed twice")
                found.add(number)
        object.__setattr__(self, "ids", tuple(sorted(found)))

    def emit(self) -> dict[str, object]:
        """The JSON form, which Positions reads back."""
        return {"tokens": list(self.ids)}

    def __str__(self) -> str:
        return f"TokenIds({show_ids(self.ids)})"


@dataclass(frozen=True, slots=True)
class Text:
    """The prompt tokens that spell a text.

    An occurrence counts when it begins and ends where tokens do, but for whitespace: the token
    " Paris" spells "Paris"; the token "concatenate" does not spell "cat". Occurrences may overlap.

    Attributes:
        text: as it stands in the decoded prompt, 1 to 65536 characters, with special tokens
            spelt out.
        occurrence: "all", or which one, from 0; a negative number counts from the last.

    Raises:
        SpecError: either is malformed.
    """

    text: str
    occurrence: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        with at("text"):
            _check_string(self.text, MAX_TEXT)
        with at("occurrence"):
            object.__setattr__(self, "occurrence", _read_which(self.occurrence))

    def emit(self) -> dict[str, object]:
        """The JSON form, which Positions reads back."""
        return {"text": self.text, "occurrence": self.occurrence}

    def __str__(self) -> str:
        which = "" if self.occurrence == "all" else f", {self.occurrence}"
        return f"Text({show(self.text)}{which})"


@dataclass(frozen=True, slots=True)
class Role:
    """The tokens of the content of a chat's messages of one role. Known only in a chat call.

    Attributes:
        role: "user", "assistant", "system", "tool" or whatever the chat has.
        message: which of the messages of that role, from 0; a negative number counts from the
            last, −1; or "all".

    Raises:
        SpecError: either is malformed.
    """

    role: str
    message: int | Literal["all"] = -1

    def __post_init__(self) -> None:
        with at("role"):
            _check_string(self.role, MAX_ROLE)
        with at("message"):
            object.__setattr__(self, "message", _read_which(self.message))

    def emit(self) -> dict[str, object]:
        """The JSON form, which Positions reads back."""
        return {"role": self.role, "message": self.message}

    def __str__(self) -> str:
        which = show(self.message) if self.message == "all" else self.message
        return f"Role({show(self.role)}, {which})"


Value = Span | Window | TokenIds | Text | Role
Item = str | int | Value

VALUES = (Span, Window, TokenIds, Text, Role)


def show_item(item: Item) -> str:
    """An item for messages."""
    return show(item) if isinstance(item, (str, int)) else str(item)


def show_ids(ids: tuple[int, ...]) -> str:
    """Token ids for messages: never many."""
    shown = ", ".join(map(str, ids[:8]))
    return f"{shown}, … {len(ids)} in all" if len(ids) > 8 else shown


def meets(item: Item, phase: str) -> bool:
    """Whether there is a prompt for which the item has a token of the phase."""
    if phase == "prompt":
        return _meets_prompt(item)
    if phase == "generated":
        return _meets_generated(item)
    return True


def _meets_prompt(item: Item) -> bool:
    if isinstance(item, Window):
        return item.start < 0
    return item not in ("generated", "last")


def _meets_generated(item: Item) -> bool:
    if isinstance(item, Span):
        # A start at or before the prompt's end: with one prompt token, the next is at `step`.
        stop = item.stop
        return stop is None or (stop > 0 and (item.start >= 1 or stop > item.step))
    if isinstance(item, Window):
        if item.stop is None:
            return True
        if item.stop <= 0:
            return False
        # From a start before the prompt's end, a step reaches past it at once; or a prompt of just
        # `step` tokens cuts the window at 0, and its next position is at the prompt's end.
        return item.start >= 0 or item.start + item.step < item.stop
    if isinstance(item, (Text, Role)):
        return False
    if isinstance(item, int):
        return item >= 1
    return item not in ("prompt", "last_prompt")


def _check_step(step: int) -> None:
    if step < 1:
        raise SpecError("step", f"expected a step of at least 1, got {step}")


def _check_string(value: object, longest: int) -> None:
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if not 1 <= len(value) <= longest:
        raise SpecError("", f"expected 1 to {longest} characters, got {len(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise SpecError("", f"{show(value)} has half of a surrogate pair") from None


def _read_which(value: object) -> int | Literal["all"]:
    if isinstance(value, str) and value == "all":
        return "all"
    if not is_int(value):
        got = show(value) if isinstance(value, str) else kind(value)
        raise SpecError("", f'expected `int` or "all", got {got}')
    return read_int(value)
