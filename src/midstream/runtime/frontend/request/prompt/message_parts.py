"""Where parts of a chat's messages are in its text: what an answer thought and said, tool calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import Region

# Renders the chat with one message in place of that with an index.
RenderWith = Callable[[int, dict[str, Any]], str]

# Fields in which messages have their reasoning beside the content.
REASONING = ("reasoning", "reasoning_content", "thinking")
# Roles that do not answer.
_ASKING = ("system", "developer", "user", "tool")
# What may be before the thinking of a content, and what ends it.
_BEGINS = re.compile(r"\s*(?:<think>|\[THINK\])?\s*")
_ENDS = re.compile(r"</think>|\[/THINK\]")
# What is before, in and after the thinking of a content, and what is said after that.
_Thought = tuple[str, str, str, str]


class PartFinder:
    """Locates a part of each message in the text of a chat, by rendering it with a mark instead."""

    def __init__(self, render: RenderWith, text: str, mark: str) -> None:
        self._render = render
        self._text = text
        self._mark = mark

    def thinking(self, index: int, message: Mapping[str, Any]) -> Region | None:
        """Return [start, stop) of what a message thought; None: it has nothing of that kind."""
        fields = [name for name in REASONING if text_of(message, name)]
        if fields:
            changed = {**message, **dict.fromkeys(fields, self._mark)}
            return self._region(index, changed, [message[name] for name in fields], "its thinking")
        parts = _thought(message)
        if parts is None or not parts[1]:
            return None
        before, thought, end, said = parts
        changed = {**message, "content": f"{before}{self._mark}{end}{said}"}
        return self._region(index, changed, [thought], "its thinking")

    def answer(self, index: int, message: Mapping[str, Any]) -> Region | None:
        """Return [start, stop) of the content after its thinking; None: it has no thinking."""
        parts = _thought(message)
        if parts is None:
            return None
        *before, said = parts
        changed = {**message, "content": "".join([*before, self._mark])}
        return self._region(index, changed, [said], "its answer")

    def tool_calls(self, index: int, message: Mapping[str, Any]) -> Region | None:
        """Return [start, stop) from the first tool call's name to the last one's arguments."""
        if not message.get("tool_calls"):
            return None
        first, last = copy.deepcopy(dict(message)), copy.deepcopy(dict(message))
        (named, name), (called, _) = functions_of(first)[0], functions_of(last)[-1]
        named["name"], called["arguments"] = self._mark, {self._mark: self._mark}
        begun, _, _ = self._render(index, first).partition(self._mark)
        _, is_there, rest = self._render(index, last).rpartition(self._mark)
        # The value is text in JSON: its quote may be another character, or none, of other values.
        is_json = rest.startswith('"}')
        stop = len(self._text) - len(rest) + (2 if is_json else 0)
        ends = self._text.endswith(rest[1:] if is_json else rest)
        if not (is_there and ends and self._text.startswith(begun + name) and len(begun) < stop):
            raise SpecError("", "the chat template leaves out its tool calls, or rewrites them")
        return len(begun), stop

    def _region(
        self, index: int, changed: dict[str, Any], parts: Sequence[str], what: str
    ) -> Region:
        """Return what the template wrote for one of some texts, in whose place the mark is."""
        pieces = self._render(index, changed).split(self._mark)
        if len(pieces) == 1:
            raise SpecError("", f"the chat template leaves out {what}")
        before, after = pieces[0], pieces[-1]
        stop = len(self._text) - len(after)
        matches = self._text.startswith(before) and self._text.endswith(after)
        written = self._text[len(before) : stop].strip()
        if len(pieces) > 2 or not matches or written not in [part.strip() for part in parts]:
            raise SpecError("", f"the chat template rewrites {what}, or writes it more than once")
        return len(before), stop


def functions_of(message: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each function that a message calls, with its name; SpecError: it calls others."""
    try:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        return [(function, str(function["name"])) for function in functions]
    except (LookupError, TypeError):
        raise SpecError("", "its tool calls are not those of functions") from None


def text_of(message: Mapping[str, Any], name: str) -> bool:
    """Return whether a field of a message is a text that is not blank."""
    value = message.get(name)
    return isinstance(value, str) and bool(value.strip())


def _thought(message: Mapping[str, Any]) -> _Thought | None:
    if message.get("role") in _ASKING:  # who may write of marks
        return None
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = _only_text(content)
    # Each search goes through the content once: its spaces may be many.
    if not isinstance(content, str):
        return None
    ended, begun = _ENDS.search(content), _BEGINS.match(content)
    if ended is None or begun is None:
        return None
    start, stop = min(begun.end(), ended.start()), ended.start()
    thought, said = content[start:stop].rstrip(), content[ended.end() :].lstrip()
    end = content[start + len(thought) : len(content) - len(said)]
    return content[:start], thought, end, said


def _only_text(parts: Sequence[Any]) -> str | None:
    """Return the text of a content given as parts; None: several that have no thinking."""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    if "thinking" in kinds or any(isinstance(text, str) and _ENDS.search(text) for text in texts):
        raise SpecError("", "its content is of several parts, of which one has its thinking")
    return None
