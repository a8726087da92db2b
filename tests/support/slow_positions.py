"""Texts and messages located one after the other: slow, and independent of the fast ways."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.prompt import Message
from midstream.plan.positions.text_map import TextMap
from midstream.runtime.frontend.request.prompt.message_spans import _parts, _within


def find_text(known: TextMap, wanted: str) -> list[tuple[int, int]]:
    """Return the token ranges of a text's occurrences, by trying each place of the prompt."""
    found = []
    text, is_blank = known.text, wanted.isspace()
    for start, stop in dict.fromkeys(zip(known.starts, known.stops, strict=True)):
        piece = text[start:stop]
        solid = min(stop - len(piece.lstrip()) + 1, stop)
        tail = stop if is_blank else max(solid, start + len(piece.rstrip()))
        for begin in (*range(start, solid), *range(tail, stop)):
            if text.startswith(wanted, begin):
                end = _end(known, begin + len(wanted), is_blank)
                # Of whitespace at the end of this token the next one is the first.
                first = begin if begin < solid else stop
                if end is not None and first < end:
                    found.append(known.tokens(first, end))
    return found


def _end(known: TextMap, end: int, is_blank: bool) -> int | None:
    """Where an occurrence up to `end` ends: there, if the token of its last character has only
    whitespace from there on; where that token starts, if it has only whitespace up to there, and
    the occurrence has more than that; None: within a token.
    """
    token = bisect_left(known.starts, end) - 1
    if not known.text[end : known.stops[token]].strip():
        return end
    start = known.starts[token]
    return None if is_blank or known.text[start:end].strip() else start


def find_messages(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[Any]], str], tokens: TextMap
) -> tuple[Message, ...]:
    """Return each message's tokens, by rendering the chat once for each message."""
    text = tokens.text
    found = []
    for index, message in enumerate(messages):
        role = str(message.get("role", ""))
        try:
            parts, _ = _parts(message.get("content"))
            if not any(parts):
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
