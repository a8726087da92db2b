"""Items of a position selection: Span, Window, TokenIds, Text, Role, Media and Between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from midstream.errors import SpecError
from midstream.validation import at, check_text, is_int, kind, read_int, read_word, show

# Limits on the memory and search time of one request; far above practical use.
MAX_IDS = 4096  # token ids in one selection
MAX_TEXT = 1 << 16  # characters of a Text
MAX_ROLE = 256  # characters of a role's name
MAX_MARK = 16  # tokens of a mark

MEDIA_KINDS = ("image", "audio", "video")
# Parts of a message.
CONTENT: Literal["content"] = "content"
PARTS = (CONTENT, "thinking", "answer", "tool_calls")


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start, start + step, … below `stop`, with the semantics of a Python slice.

    Attributes:
        start: a negative value counts back from the prompt's end, clipped to 0. None is 0.
        stop: likewise; None is the end of the request, generated tokens included.
        step: at least 1. None is 1.

    Raises:
        SpecError: a step below 1, or a span that is empty for every prompt length.
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
        # Bounds with different origins (prompt start and prompt end) can only be compared when
        # the prompt's length is known.
        same_origin = (self.start < 0) == (self.stop < 0)
        if self.stop == 0 or (same_origin and self.start >= self.stop):
            raise SpecError("", f"the span {self} is empty for every prompt")

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        return {"slice": [self.start, self.stop, self.step]}

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Return start and stop, counted from 0, for a prompt of `prompt_len` tokens."""
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

    `Window(-5, 0)` selects the last five prompt tokens, `Window(0, 10)` the first ten generated
    tokens. The start is clipped to position 0; steps then count from 0.

    Attributes:
        start: offset from the prompt's end, in tokens; negative: before it.
        stop: likewise; None is the end of the request.
        step: at least 1.

    Raises:
        SpecError: a step below 1, or an empty window.
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
        """Return the JSON form, which Positions reads."""
        return {"window": [self.start, self.stop, self.step]}

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Return start and stop, counted from 0, for a prompt of `prompt_len` tokens."""
        stop = None if self.stop is None else max(0, prompt_len + self.stop)
        return (max(0, prompt_len + self.start), stop)

    def __str__(self) -> str:
        step = f", {self.step}" if self.step != 1 else ""
        return f"Window({self.start}, {self.stop}{step})"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Every prompt or generated token whose id is in a set.

    Attributes:
        ids: 1 to 4096 distinct token ids, ascending; given as an int, or a list in any order.

    Raises:
        SpecError: no id, too many ids, a duplicate, or an id outside 0 … 2**31 − 1.
    """

    ids: tuple[int, ...]

    def __init__(self, ids: object) -> None:
        values = [ids] if is_int(ids) else ids
        if not isinstance(values, (list, tuple)):
            raise SpecError(
                "", f"expected a token id, an `int`, or a list of them, got {kind(ids)}"
            )
        if not 1 <= len(values) <= MAX_IDS:
            raise SpecError("", f"expected 1 to {MAX_IDS} token ids, got {len(values)}")
        numbers: set[int] = set()
        for index, value in enumerate(values):
            with at("" if values is not ids else f"[{index}]"):
                number = read_int(value)
                if not 0 <= number < 2**31:
                    raise SpecError("", f"expected a token id, 0 to 2**31 - 1, got {show(number)}")
                if number in numbers:
                    raise SpecError("", f"token id {number} is listed twice")
                numbers.add(number)
        object.__setattr__(self, "ids", tuple(sorted(numbers)))

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        return {"tokens": list(self.ids)}

    def __str__(self) -> str:
        return f"TokenIds({show_ids(self.ids)})"


@dataclass(frozen=True, slots=True)
class Text:
    """The prompt tokens that spell a text.

    An occurrence must begin and end at token boundaries, ignoring whitespace: the token " Paris"
    spells "Paris"; of "x", " =", " 5" the first two spell "x = "; the token "concatenate" does not
    spell "cat". Occurrences may overlap.

    Attributes:
        text: 1 to 65536 characters of the decoded prompt, including special tokens as text.
        occurrence: "all", or the index of one occurrence, from 0; negative: from the last.

    Raises:
        SpecError: a field is malformed.
    """

    text: str
    occurrence: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        with at("text"):
            _check_string(self.text, MAX_TEXT)
        with at("occurrence"):
            object.__setattr__(self, "occurrence", _read_which(self.occurrence))

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        return {"text": self.text, "occurrence": self.occurrence}

    def __str__(self) -> str:
        which = "" if self.occurrence == "all" else f", {self.occurrence}"
        return f"Text({show(self.text)}{which})"


@dataclass(frozen=True, slots=True)
class Role:
    """The tokens of a chat's messages of one role, or of a part of these. Requires a chat call.

    Attributes:
        role: "user", "assistant", "system", "tool" or any other role of the chat.
        message: index among the messages of that role, from 0; negative: from the last; or "all".
        part: "content"; "thinking", the field `reasoning` (or `reasoning_content`, `thinking`), or
            what the content has between `<think>` and `</think>`; "answer", the content after
            that; "tool_calls", from the name of the first call to the arguments of the last.
            A message without the part is skipped by "all". One of which the chat template leaves
            the part out is rejected.

    Raises:
        SpecError: a field is malformed.
    """

    role: str
    message: int | Literal["all"] = -1
    part: Literal["content", "thinking", "answer", "tool_calls"] = CONTENT

    def __post_init__(self) -> None:
        with at("role"):
            _check_string(self.role, MAX_ROLE)
        with at("part"):
            read_word(self.part, PARTS)
        with at("message"):
            object.__setattr__(self, "message", _read_which(self.message))

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        part = {} if self.part == CONTENT else {"part": self.part}
        return {"role": self.role, "message": self.message, **part}

    def __str__(self) -> str:
        which = show(self.message) if self.message == "all" else self.message
        part = "" if self.part == CONTENT else f", {show(self.part)}"
        return f"Role({show(self.role)}, {which}{part})"


@dataclass(frozen=True, slots=True)
class Media:
    """The prompt tokens in whose place the model gets the embeddings of an image, audio or video.

    Tokens that a model writes around and between these (begin and end of an image, its rows, times
    in a video) are not selected: they have embeddings of their own.

    Attributes:
        index: among the items of this kind, in the order of the prompt, from 0; negative: from the
            last; or "all".
        kind: "image", "audio" or "video".

    Raises:
        SpecError: a field is malformed.
    """

    index: int | Literal["all"]
    kind: Literal["image", "audio", "video"]

    def __post_init__(self) -> None:
        with at("index"):
            object.__setattr__(self, "index", _read_which(self.index))
        with at("kind"):
            read_word(self.kind, MEDIA_KINDS)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        return {self.kind: self.index}

    def __str__(self) -> str:
        which = show(self.index) if self.index == "all" else self.index
        return f"Image({which})" if self.kind == "image" else f"Media({which}, {show(self.kind)})"


def Image(index: int | Literal["all"]) -> Media:
    """Return `Media(index, "image")`: the tokens of an image of the prompt, or of all.

    Raises:
        SpecError: `index` is neither an int nor "all".
    """
    return Media(index, "image")


Mark = str | tuple[int, ...] | list[int] | None  # no list once it is read


@dataclass(frozen=True, slots=True)
class Between:
    """The tokens after a start mark and before the next end mark, prompt and generated.

    Neither mark is selected, every pair counts, and marks do not nest: between two marks another
    start mark is a token like others. If the end never comes, all that follows the start is
    selected; if the start never comes, nothing. Of an end mark of several tokens all but the last
    are selected: when these are computed, it is unknown whether the last will come.

    Attributes:
        start: the text of a mark that is one token, or the token ids of a mark, 1 to 16, as an int
            or a list. None: tokens are selected from the first of the prompt to the first end mark.
        end: likewise. None: all tokens after the first start mark are selected.

    Raises:
        SpecError: a field is malformed, or both are None.
    """

    start: Mark
    end: Mark

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            with at(name):
                object.__setattr__(self, name, _read_mark(getattr(self, name)))
        if self.start is None and self.end is None:
            raise SpecError("", 'expected a mark, got None for both; use "all" for all tokens')

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which Positions reads."""
        marks = [list(mark) if isinstance(mark, tuple) else mark for mark in (self.start, self.end)]
        return {"between": marks}

    def __str__(self) -> str:
        start, end = (
            f"[{show_ids(mark)}]" if isinstance(mark, tuple) else mark and show(mark)
            for mark in (self.start, self.end)
        )
        return f"Between({start}, {end})"


Value = Span | Window | TokenIds | Text | Role | Media | Between
Item = str | int | Value

VALUES = (Span, Window, TokenIds, Text, Role, Media, Between)
# Those that are located in the prompt alone, by more than its length.
IN_PROMPT = (Text, Role, Media)


def show_item(item: Item) -> str:
    """Return an item for messages."""
    return show(item) if isinstance(item, (str, int)) else str(item)


def show_ids(ids: tuple[int, ...]) -> str:
    """Return token ids for messages, at most the first 8."""
    shown = ", ".join(map(str, ids[:8]))
    return f"{shown}, … {len(ids)} in total" if len(ids) > 8 else shown


def meets(item: Item, phase: str) -> bool:
    """Return whether the item selects a token of the phase for some prompt."""
    if phase == "prompt":
        return item.start < 0 if isinstance(item, Window) else item not in ("generated", "last_row")
    return phase == "all" or _meets_generated(item)


def _meets_generated(item: Item) -> bool:
    if isinstance(item, Span):
        # With a start at or before a one-token prompt's end, the next position is `step`.
        stop = item.stop
        return stop is None or (stop > 0 and (item.start >= 1 or stop > item.step))
    if isinstance(item, Window):
        if item.stop is None or item.stop <= 0:
            return item.stop is None
        # Either the first step from a negative start passes the prompt's end, or a prompt of
        # `step` tokens clips the start to 0, so that the next position is the prompt's end.
        return item.start >= 0 or item.start + item.step < item.stop
    if isinstance(item, IN_PROMPT):
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
    check_text(value)


def _read_mark(value: object) -> Mark:
    if value is None:
        return None
    if isinstance(value, str):
        _check_string(value, MAX_TEXT)
        return value
    values = [value] if is_int(value) else value
    if not isinstance(values, (list, tuple)):
        raise SpecError("", f"expected a text, token ids or None, got {kind(value)}")
    if not 1 <= len(values) <= MAX_MARK:
        raise SpecError("", f"expected 1 to {MAX_MARK} token ids of a mark, got {len(values)}")
    numbers = tuple(read_int(number) for number in values)
    if not 0 <= min(numbers) <= max(numbers) < 2**31:
        raise SpecError("", f"expected token ids, 0 to 2**31 - 1, got {show_ids(numbers)}")
    return numbers


def _read_which(value: object) -> int | Literal["all"]:
    if isinstance(value, str) and value == "all":
        return "all"
    if not is_int(value):
        got = show(value) if isinstance(value, str) else kind(value)
        raise SpecError("", f'expected `int` or "all", got {got}')
    return read_int(value)
