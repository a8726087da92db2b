"""Token ids of a text that follows other text: some tokenizers put a space before a text alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode
from midstream.validation import show

# Texts that hardly any token joins with the text after them.
_BEFORE = ("\n", "a", ".")


def ids_after(
    tokenizer: Any, before: Sequence[int], whole: Sequence[int], text: str
) -> list[int] | None:
    """Return the token ids of a text that follows another; None: none spell it there.

    They are the rest of both texts tokenized together, if that begins with the tokens of the first.
    Otherwise a token spans the two, and they are those of the text elsewhere, if they spell it.
    """
    before, whole = list(before), list(whole)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    spelt = decode(tokenizer, whole)
    for ids in _elsewhere(tokenizer, text):
        if decode(tokenizer, [*before, *ids]) == spelt:
            return ids
    return None


def following_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text as it is spelt after other text, whatever that is."""
    for first in _BEFORE:
        before = tokenizer.encode(first, add_special_tokens=False)
        whole = tokenizer.encode(first + text, add_special_tokens=False)
        ids = ids_after(tokenizer, before, whole, text)
        if ids is not None:
            return ids
    raise SpecError(
        "", f"this tokenizer has no tokens for {show(text)} behind other text; give token ids"
    )


def _elsewhere(tokenizer: Any, text: str) -> Iterator[list[int]]:
    """Yield the token ids of a text alone, and of it behind other texts that are not joined."""
    yield list(tokenizer.encode(text, add_special_tokens=False))
    for first in _BEFORE:
        before = list(tokenizer.encode(first, add_special_tokens=False))
        whole = list(tokenizer.encode(first + text, add_special_tokens=False))
        if whole[: len(before)] == before:
            yield whole[len(before) :]


def one_token_id(tokenizer: Any, text: str) -> int:
    """Return the id of the token that spells a text after other text: `" Paris"` with its space."""
    ids = following_ids(tokenizer, text)
    if len(ids) == 1:
        return int(ids[0])
    parts = " ".join(show(decode(tokenizer, [token])) for token in ids[:8])
    more = " …" if len(ids) > 8 else ""
    problem = f"{show(text)} is {len(ids)} tokens, {parts}{more}; give a text that is one"
    spaced = [] if text.startswith(" ") else following_ids(tokenizer, f" {text}")
    raise SpecError("", f"{problem}, as {show(f' {text}')} is" if len(spaced) == 1 else problem)
