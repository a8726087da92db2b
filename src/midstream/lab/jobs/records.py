"""Lines of a dataset: the prompt of a line, or the reason why it has none."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from midstream.errors import SpecError
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.validation import at, check_regular, check_text, kind, listed, read_json, show

Prompt = str | list[dict[str, Any]] | PromptTokens

_MOST_NAMES = 8
# Fields of a content's parts with a URL, and those of which a line's JSON has not all data.
_URLS = ("image_url", "audio_url", "video_url")
_UNSTORED = ("uuid", "image_pil")
_MOST_BYTES = 256 << 20  # of a file


@dataclass(frozen=True, slots=True)
class Record:
    """A line with a prompt: a text, messages of a conversation, or token ids."""

    line: int  # number in the data, from 1; of a packed prompt its number among these
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Failed:
    """A line without captured rows."""

    line: int  # number in the data, from 1
    reason: str


def read_text(line: int, text: bytes, field: str, chat: bool, files: str = "") -> Record | Failed:
    """Parse one JSON line: an object with the prompt in a field, or the prompt itself.

    Media of a conversation may be files below the folder `files`; empty: no files.
    """
    try:
        value = read_json(text)
        if isinstance(value, Mapping):
            if field not in value:
                raise SpecError("", f"the field {show(field)} is missing; found {_some(value)}")
            with at(field):
                return Record(line, read_prompt(value[field], chat, files))
        if not isinstance(value, str):
            raise SpecError(
                "", f"expected an object with a field {show(field)}, or a string, got {kind(value)}"
            )
        return Record(line, read_prompt(value, chat, files))
    except SpecError as error:
        return Failed(line, str(error))


def read_value(
    line: int, value: object, field: str, chat: bool, files: str = ""
) -> Record | Failed:
    """Parse one table row from the value of its column `field`; `files` as in `read_text`."""
    try:
        with at(field):
            return Record(line, read_prompt(value, chat, files))
    except SpecError as error:
        return Failed(line, str(error))


def read_prompt(value: object, chat: bool, files: str) -> Prompt:
    """Parse a prompt: a text; with `chat`, a list of messages or the text of one user message."""
    if isinstance(value, str):
        check_text(value)
        return [{"role": "user", "content": value}] if chat else value
    if not chat:
        raise SpecError("", f"expected the prompt's text, `str`, got {kind(value)}")
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else kind(value)
        raise SpecError("", f"expected a list of messages, got {got}")
    messages = []
    for index, message in enumerate(value):
        with at(f"[{index}]"):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise SpecError("", "expected a message, an object with `role` and `content`")
            content = message.get("content")
            if isinstance(content, str):
                check_text(content)
            elif isinstance(content, list):
                with at("content"):
                    parts = [_part(f"[{index}]", part, files) for index, part in enumerate(content)]
                message = {**message, "content": parts}
            messages.append(message)
    return messages


def _part(path: str, part: object, files: str) -> object:
    """Return a part of a content, with files as `data:` URLs: a line's id is of all its data."""
    if not isinstance(part, dict):
        return part
    for name in _UNSTORED:
        if part.get(name) is not None:
            raise SpecError(f"{path}.{name}", "leave out: a job knows media by their data alone")
    for name in _URLS:
        value = part.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            with at(f"{path}.{name}"):
                url = _data_url(url, files)
            part = {**part, name: {**value, "url": url} if isinstance(value, dict) else url}
    return part


def _data_url(url: str, files: str) -> str:
    scheme = url[:5].lower()
    if scheme == "data:" and url.partition(",")[0].lower().endswith(";base64"):
        return url
    if scheme != "file:":
        raise SpecError(
            "",
            f"{show(url[:80])}: expected a `data:` URL in base64, or a `file://` URL; a job "
            "fetches no media, which may have changed when it is resumed",
        )
    split = urlsplit(url)
    path = Path(url2pathname(split.path))
    if not files:
        raise SpecError(
            "",
            f"{show(url)}: `engine_args` has no `allowed_local_media_path`, from which files are "
            "read",
        )
    if split.netloc or Path(files).resolve() not in path.resolve().parents:
        raise SpecError("", f"{show(url)} is not in `allowed_local_media_path`, {files}")
    try:
        if check_regular(path).st_size > _MOST_BYTES:
            raise SpecError("", f"{path}: a file of more than {_MOST_BYTES >> 20} MiB")
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise SpecError("", f"{path}: {error.strerror}") from None
    return f"data:{mimetypes.guess_type(path)[0] or ''};base64,{data}"


def _some(names: Mapping[str, Any]) -> str:
    shown = listed(str(name)[:40] for name in list(names)[:_MOST_NAMES])
    return f"{shown}, …" if len(names) > _MOST_NAMES else shown or "none"
