"""Tokens and lenses as `Lens`, `Logits` and `Steer` name them: tokens by id or by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from midstream.errors import SpecError
from midstream.plan.sink_target import read_name
from midstream.validation import INT_LIMIT, as_list, at, is_int, kind, read_int, show

Token: TypeAlias = int | str
# The lens without maps.
LOGIT: Literal["logit"] = "logit"
# The sites that have the stream itself.
STREAM = ("resid_pre", "resid_mid", "resid_post")


def read_token(value: object) -> Token:
    """Read a token's id, or its text."""
    if isinstance(value, str):
        if not value:
            raise SpecError("", "expected a token's text, got an empty one")
        return value
    token = read_int(value)
    if not 0 <= token <= INT_LIMIT:
        raise SpecError("", f"expected token ids from 0, got {token}")
    return token


def read_tokens(value: Any, most: int) -> tuple[Token, ...]:
    values = [value] if isinstance(value, str) or is_int(value) else as_list(value)
    if not isinstance(values, (list, tuple, range)):
        raise SpecError("", f"expected token ids, or texts of tokens, got {kind(value)}")
    if len(values) > most:
        raise SpecError("", f"expected at most {most} tokens, got {len(values)}")
    tokens: dict[Token, None] = {}
    for index, text_or_id in enumerate(values):
        with at(f"[{index}]"):
            token = read_token(text_or_id)
            if token in tokens:
                raise SpecError("", f"token {show(token)} is given twice")
            tokens[token] = None
    return tuple(tokens)


def ids_of(tokens: Sequence[Token], id_of: Callable[[str], int]) -> list[int]:
    """Return the ids of tokens; `id_of` returns that of a token's text."""
    by_id: dict[int, Token] = {}
    for index, text_or_id in enumerate(tokens):
        with at(f"tokens[{index}]"):
            token = id_of(text_or_id) if isinstance(text_or_id, str) else text_or_id
            if token in by_id:
                first = show(by_id[token])
                raise SpecError(
                    "", f"{show(text_or_id)} is token {token}, which {first} is already"
                )
            by_id[token] = text_or_id
    return list(by_id)


def known_ids(tokens: Sequence[Token]) -> list[int]:
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            raise SpecError(f"tokens[{index}]", "expected a token id here, got a text")
    return [token for token in tokens if isinstance(token, int)]


def read_kind(value: object) -> str:
    """Read "logit", or the name of a registered lens."""
    if not isinstance(value, str):
        problem = f"expected `str`, got {kind(value)}"
        if hasattr(value, "matrices"):
            problem += "; register it, and give its name: llm.lenses.register(name, lens)"
        raise SpecError("", problem)
    return read_name(value, may_be_empty=False)
