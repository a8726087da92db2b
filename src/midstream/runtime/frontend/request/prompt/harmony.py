"""Messages of a chat in a prompt that vLLM's server made by harmony, as for gpt-oss, and not by the
model's chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import Region
from midstream.plan.positions.items import CONTENT
from midstream.plan.positions.prompt import Message
from midstream.plan.positions.text_map import TextMap
from midstream.runtime.frontend.request.prompt.message_parts import REASONING, functions_of, text_of

_TOKEN = re.compile(r"<\|(start|message|end|call|return)\|>")
_BEGIN = "<|start|>system<|message|>"
_INSTRUCTIONS = "# Instructions\n\n"
_UNLIKE = "the prompt does not have it as harmony writes it"


class _Block(NamedTuple):
    """A message of harmony: its header, and where its content is."""

    header: str
    header_start: int
    start: int
    stop: int


def is_harmony(text: str) -> bool:
    return text.startswith(_BEGIN)


def harmony_spans(
    messages: Sequence[Mapping[str, Any]], tokens: TextMap, part: str
) -> tuple[Message, ...]:
    """Return a part of each message, as `message_spans` does, in a prompt that `is_harmony`."""
    reader = _Reader(tokens.text)
    spans = []
    for index, message in enumerate(messages):
        role = str(message.get("role", ""))
        try:
            region = reader.read(message, index == 0).get("content" if part == "answer" else part)
        except SpecError as error:
            spans.append(Message(role, index, problem=error.problem))
            continue
        start, stop = (0, 0) if region is None else tokens.tokens(*region)
        spans.append(Message(role, index, start, stop))
        if part == "thinking" and region is None and _reasoning(message):
            problem = "harmony leaves out its thinking, as an answer follows it"
            spans[-1] = Message(role, index, problem=problem)
    return tuple(spans)


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the messages of a prompt, in one pass: a client may have written tokens of harmony."""
    header, content = None, None  # where they begin
    for token in _TOKEN.finditer(text):
        if header is None:
            header = token.end() if token[1] == "start" else None
        elif content is None:
            if token[1] == "message":
                stop, content = token.start(), token.end()
        elif token[1] not in ("start", "message"):
            yield _Block(text[header:stop], header, content, token.start())
            header, content = None, None


class _Reader:
    """Reads the blocks of a prompt in their order, as the messages of a chat have become them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._blocks = list(_blocks(text))
        self._next = 1  # the first is the system's
        if len(self._blocks) > 1 and self._blocks[1].header == "developer":
            self._next = 2

    def read(self, message: Mapping[str, Any], is_first: bool) -> dict[str, Region]:
        """Return where the parts of the next message are."""
        role, content = message.get("role"), _content_of(message)
        if role in ("system", "developer") and is_first:
            return self._read_instructions(content)
        if role == "tool":
            return {CONTENT: self._take("functions.", content)}
        if role != "assistant":
            region = self._take(str(role), content)
            return {CONTENT: region} if content else {}
        parts: dict[str, Region] = {}
        calls = functions_of(message)
        if calls and content:
            parts[CONTENT] = self._take("assistant<|channel|>commentary", content)
        for thought in _reasoning(message):
            block = self._peek()
            if block.header == "assistant<|channel|>analysis" and self._has(block, thought):
                parts["thinking"] = self._take(block.header, thought)
                break
        if not calls and content:
            parts[CONTENT] = self._take("assistant<|channel|>final", content)
        for function, called in calls:
            name = f"functions.{called}"
            block, arguments = self._peek(), function.get("arguments") or ""
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments)
            if not block.header.startswith("assistant") or name not in block.header:
                raise SpecError("", _UNLIKE)
            begun = block.header_start + block.header.index(name) + len("functions.")
            _, stop = self._take(block.header, arguments)
            parts["tool_calls"] = parts.get("tool_calls", (begun, stop))[0], stop
        return parts

    def _read_instructions(self, content: str) -> dict[str, Region]:
        for block in self._blocks[:2]:
            at = self._text.find(_INSTRUCTIONS + content, block.start, block.stop)
            if at >= 0 and content:
                start = at + len(_INSTRUCTIONS)
                return {CONTENT: (start, start + len(content))}
        raise SpecError("", _UNLIKE)

    def _peek(self) -> _Block:
        if self._next >= len(self._blocks):
            raise SpecError("", _UNLIKE)
        return self._blocks[self._next]

    def _take(self, header: str, content: str) -> Region:
        block = self._peek()
        if not block.header.startswith(header) or not self._has(block, content):
            raise SpecError("", _UNLIKE)
        self._next += 1
        return block.start, block.stop

    def _has(self, block: _Block, content: str) -> bool:
        return self._text[block.start : block.stop] == content


def _reasoning(message: Mapping[str, Any]) -> list[str]:
    return [message[name] for name in REASONING if text_of(message, name)]


def _content_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
    return "".join(map(str, texts))
