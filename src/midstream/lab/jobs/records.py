"""Lines of a dataset: the prompt of a line, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.validation import at, check_text, kind, listed, read_json, show

Prompt = str | list[dict[str, Any]]

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """A line with a prompt: a text, or messages of a conversation."""

    line: int  # number in the data, from 1
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Failed:
    """A line without captured rows."""

    line: int  # number in the data, from 1
    reason: str


def read_text(line: int, text: bytes, field: str, chat: bool) -> Record | Failed:
    """Parse one JSON line: an object with the prompt in a field, or the prompt itself."""
    try:
        value = read_json(text)
        if isinstance(value, Mapping):
            if field not in value:
                raise SpecError("", f"the field {show(field)} is missing; found {_some(value)}")
            with at(field):
                return Record(line, read_prompt(value[field], chat))
        if not isinstance(value, str):
            raise SpecError(
                "", f"expected an object with a field {show(field)}, or a string, got {kind(value)}"
            )
        return Record(line, read_prompt(value, chat))
    except SpecError as error:
        return Failed(line, str(error))


def read_value(line: int, value: object, field: str, chat: bool) -> Record | Failed:
    """Parse one table row from the value of its column `field`."""
    try:
        with at(field):
            return Record(line, read_prompt(value, chat))
    except SpecError as error:
        return Failed(line, str(error))


def read_prompt(value: object, chat: bool) -> Prompt:
    """Parse a prompt: a text; with `chat`, a list of messages or the text of one user message."""
    if isinstance(value, str):
        check_text(value)
        return [{"role": "user", "content": value}] if chat else value
    if not chat:
        raise SpecError("", f"expected the prompt's text, `str`, got {kind(value)}")
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else kind(value)
        raise SpecError("", f"expected a list of messages, got {got}")
    for index, message in enumerate(value):
        with at(f"[{index}]"):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise SpecError("", "expected a message, an object with `role` and `content`")
            if isinstance(message.get("content"), str):
                check_text(message["content"])
    return value


def _some(names: Mapping[str, Any]) -> str:
    shown = listed(str(name)[:40] for name in list(names)[:_MOST_NAMES])
    return f"{shown}, …" if len(names) > _MOST_NAMES else shown or "none"
