"""Texts and messages located one after the other: slow, and independent of the fast ways."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.spec.positions.prompt import Message
from midstream.spec.positions.text_map import TextMap
from midstream.validation import show

_TEXT_PARTS = ("text", "input_text", "output_text")


def find_text(known: TextMap, wanted: str) -> list[tuple[int, int]]:
    """Return the token ranges of a text's occurrences, by trying each place of the prompt."""
    found = []
    text = known.text
    for start, stop in dict.fromkeys(zip(known.starts, known.stops, strict=True)):
        for begin in range(start, stop):
            if text.startswith(wanted, begin) and _ends(known, begin + len(wanted)):
                found.append(known.tokens(begin, begin + len(wanted)))
            if not text[begin].isspace():
                break
    return found


def _ends(known: TextMap, end: int) -> bool:
    rest = known.text[end : known.stops[bisect_left(known.starts, end) - 1]]
    return not rest or rest.isspace()


def find_messages(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[Any]], str], tokens: TextMap
) -> tuple[Message, ...]:
    """Return each message's tokens, by rendering the chat once for each message."""
    text = tokens.text
    found = []
    for index, message in enumerate(messages):
        role = str(message.get("role", ""))
        try:
            parts = _parts(message.get("content"))
            if not any(part.strip() for part in parts):
                found.append(Message(role, index))
                continue
            start, stop = tokens.tokens(*_characters(messages, index, parts, render, text))
        except SpecError as error:
            found.append(Message(role, index, problem=error.problem))
            continue
        found.append(Message(role, index, start, stop))
    return tuple(found)


def _characters(
    messages: Sequence[Mapping[str, Any]],
    index: int,
    parts: list[str],
    render: Callable[[list[Any]], str],
    text: str,
) -> tuple[int, int]:
    mark = "onlymark"
    assert mark not in text
    content: Any = mark
    if not isinstance(messages[index]["content"], str):
        content = [{"type": "text", "text": mark}]
    marked = list(messages)
    marked[index] = {**marked[index], "content": content}
    pieces = render(marked).split(mark)
    if len(pieces) != 2:
        how = "does not write it as it is" if len(pieces) == 1 else "writes it more than once"
        raise SpecError("", f"the chat template {how}")
    before, after = pieces
    end = len(text) - len(after)
    if not (text.startswith(before) and text.endswith(after) and len(before) <= end):
        raise SpecError("", "the chat template treats it differently from other contents")
    start, stop = _within(text[len(before) : end], parts)
    return len(before) + start, len(before) + stop


def _parts(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise SpecError("", f"its content is a `{type(content).__name__}`, not text")
    found = []
    for part in content:
        if isinstance(part, str):
            found.append(part)
            continue
        sort = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if sort not in _TEXT_PARTS or not isinstance(text, str):
            raise SpecError(
                "", f"its content has a part of type {show(str(sort))}, which is no text"
            )
        found.append(text)
    return found


def _within(region: str, parts: list[str]) -> tuple[int, int]:
    """Return [start, stop) of the parts in the text that the template wrote for them.

    A template may drop some of a content, as outer whitespace or reasoning: then all of the region
    is content.

    Args:
        region: the text that the template wrote.
        parts: texts of the content.

    Raises:
        SpecError: a part is missing, or occurs more than once.
    """
    if len(parts) == 1 and region.strip() and region in parts[0]:
        return 0, len(region)
    found = [part for part in (each.strip() for each in parts) if part]
    start, reached = None, 0
    for part in found:
        place = region.find(part, reached)
        if place < 0:
            raise SpecError("", "the chat template rewrites it, or leaves it out")
        start, reached = place if start is None else start, place + len(part)
    # If it occurs more than once, text of the template may be taken for it.
    if start is None or (len(found) == 1 and region.count(found[0]) > 1):
        raise SpecError("", "the chat template writes it more than once")
    return start, reached
