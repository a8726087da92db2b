"""Tokens by id or by text, as `Lens`, `Logits` and `Steer` take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from midstream.errors import SpecError
from midstream.validation import INT_LIMIT, as_list, at, is_int, kind, read_int, show

Token: TypeAlias = int | str


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
    """Read a token, or a list of at most `most` of them, each once."""
    values = [value] if isinstance(value, str) or is_int(value) else as_list(value)
    if not isinstance(values, (list, tuple, range)):
        raise SpecError("", f"expected token ids, or texts of tokens, got {kind(value)}")
    if len(values) > most:
        raise SpecError("", f"expected at most {most} tokens, got {len(values)}")
    found: dict[Token, None] = {}
    for nth, one in enumerate(values):
        with at(f"[{nth}]"):
            token = read_token(one)
            if token in found:
                raise SpecError("", f"token {show(token)} is given twice")
            found[token] = None
    return tuple(found)


def ids_of(tokens: Sequence[Token], id_of: Callable[[str], int]) -> list[int]:
    """Return the ids of tokens.

    Args:
        id_of: returns the id of a token's text.
    """
    found: dict[int, Token] = {}
    for nth, one in enumerate(tokens):
        with at(f"tokens[{nth}]"):
            token = id_of(one) if isinstance(one, str) else one
            if token in found:
                first = show(found[token])
                raise SpecError("", f"{show(one)} is token {token}, which {first} is already")
            found[token] = one
    return list(found)


def known_ids(tokens: Sequence[Token]) -> list[int]:
    """Return tokens that have ids."""
    for nth, token in enumerate(tokens):
        if isinstance(token, str):
            raise SpecError(f"tokens[{nth}]", "expected a token id here, got a text")
    return [token for token in tokens if isinstance(token, int)]
