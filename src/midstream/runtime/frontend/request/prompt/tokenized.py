"""A prompt in any of its forms as tokens, before an engine gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode, text_map
from midstream.plan.positions.following_text import one_token_id
from midstream.plan.positions.items import CONTENT
from midstream.plan.positions.prompt import Prompt
from midstream.runtime.frontend.request.prompt.inputs import named_refusals
from midstream.runtime.frontend.request.prompt.message_spans import (
    chat_params,
    chat_renderer,
    message_spans,
)
from midstream.validation import at, is_int, kind, read_int

_FORMS = 'text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or the messages of a chat'


def tokenize(engine: Any, prompt: Any, template: Mapping[str, Any]) -> Prompt:
    """Return the tokens of a text, token ids, a dict or messages, as vLLM makes them."""
    if isinstance(prompt, Mapping) and "role" not in prompt:
        prompt = _of_dict(prompt)
    if is_chat(prompt):
        return _of_messages(engine, list(prompt), template)
    if isinstance(prompt, str):
        with named_refusals():
            ids = list(_tokenizer(engine).encode(prompt))
    elif isinstance(prompt, (list, tuple)):
        ids = [_read_id(index, value) for index, value in enumerate(prompt)]
    else:
        raise SpecError("", f"expected {_FORMS}, got {kind(prompt)}")
    return _with_text(engine, ids)


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and any(
        isinstance(message, Mapping) for message in prompt
    )


def token_texts(engine: Any, prompt: Prompt) -> tuple[str, ...]:
    """Return the text of each token; its id where the engine has no tokenizer."""
    assert prompt.token_ids is not None
    try:
        tokenizer = _tokenizer(engine)
    except SpecError:
        return tuple(map(str, prompt.token_ids))
    try:
        text_map = prompt.text_map
    except SpecError:
        text_map = None
    if text_map is None:
        return tuple(decode(tokenizer, [token]) for token in prompt.token_ids)
    spans = zip(text_map.starts, text_map.stops, strict=True)
    return tuple(text_map.text[start:stop] for start, stop in spans)


def texts_of(engine: Any, ids: Sequence[int]) -> list[str]:
    tokenizer = _tokenizer(engine, "the text of a token")
    known = {token: decode(tokenizer, [token]) for token in set(ids)}
    return [known[token] for token in ids]


def token_id(engine: Any, text: str) -> int:
    return one_token_id(_tokenizer(engine, "a token's text"), text)


def _of_dict(prompt: Mapping[str, Any]) -> Any:
    for name in ("prompt_token_ids", "prompt"):
        if name in prompt:
            others = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
            if others:
                raise SpecError(others[0], f"unsupported here; expected {_FORMS}")
            return prompt[name]
    raise SpecError("", f"expected {_FORMS}, got a dict of {', '.join(map(repr, prompt))}")


def _of_messages(engine: Any, messages: list[Any], template: Mapping[str, Any]) -> Prompt:
    tokenizer = _tokenizer(engine)
    render = chat_renderer(engine.renderer, chat_params(**template))
    with named_refusals():
        ids = list(tokenizer.encode(render(messages), add_special_tokens=False))

    def parts(part: str = CONTENT) -> Any:
        return message_spans(tokenizer, messages, ids, render=render, part=part)

    return _with_text(engine, ids, parts)


def _with_text(engine: Any, ids: list[int], messages: Any = None) -> Prompt:
    if not ids:
        raise SpecError("", "expected at least one token, got none")

    def text() -> Any:
        return text_map(_tokenizer(engine), ids)

    return Prompt(len(ids), tuple(ids), text, messages)


def _read_id(index: int, value: object) -> int:
    with at(f"[{index}]"):
        if not is_int(value):
            raise SpecError("", f"expected a token id, `int`, got {kind(value)}")
        token_id = read_int(value)
        if token_id < 0:
            raise SpecError("", f"expected a token id from 0, got {token_id}")
        return token_id


def _tokenizer(engine: Any, what: str = "a text") -> Any:
    try:
        tokenizer = engine.get_tokenizer()
    except ValueError as error:
        raise SpecError(
            "", f"{what} needs a tokenizer, and this engine has none; give token ids"
        ) from error
    if tokenizer is None:
        raise SpecError("", f"{what} needs a tokenizer, and this engine has none; give token ids")
    return tokenizer
