"""The text of a prompt by token, in which texts and chat messages are located."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.text_map import TextMap

# Decoders write this for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"

# Tokens that may wait for the rest of a character. A character has at most four bytes, but each
# token may end one and begin the next; past this many the bytes are not text, and stay as decoded.
_LONGEST_WAIT = 32


def text_map(tokenizer: Any, token_ids: Sequence[int]) -> TextMap:
    """Return the decoded text of a prompt, special tokens included, and each token's characters."""
    return _Decoding(tokenizer, list(token_ids)).run()


class _Decoding:
    """Decodes groups of tokens: usually one token, several if they share a character.

    A token is decoded together with the previous group, as decoders may drop a first token's space.
    """

    def __init__(self, tokenizer: Any, ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._pieces: list[str] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._length = 0

    def run(self) -> TextMap:
        before = first = 0
        head = ""
        seen: list[str] = []
        for end in range(1, len(self._ids) + 1):
            text = self._decode(before, end)
            seen.append(text[len(head) :] if text.startswith(head) else text)
            waits = seen[-1].endswith(_REPLACEMENT) and len(seen) < _LONGEST_WAIT
            if waits and end < len(self._ids):
                continue
            self._close(seen)
            before, first = first, end
            head = self._decode(before, first)
            seen = []
        text = "".join(self._pieces)
        whole = self._decode(0, len(self._ids))
        if text != whole:
            raise SpecError(
                "",
                "this tokenizer does not decode the prompt token by token, so texts cannot be "
                "found in it; use token ids or positions by number",
            )
        return TextMap(text, tuple(self._starts), tuple(self._stops))

    def _close(self, seen: list[str]) -> None:
        """Add a group, given the text of its first token, of its first two, and so on."""
        whole = seen[-1]
        # Text that was there before a token, and is there after all of them, belongs to earlier
        # tokens: a replacement that stays is itself the character.
        edge = waiting = 0
        for spelt in seen:
            waiting += 1
            if edge and len(spelt) == edge and whole.startswith(spelt):
                # It added nothing: another byte of a replacement that was there already.
                self._starts += [self._starts[-1]] * waiting
                self._stops += [self._stops[-1]] * waiting
                waiting = 0
            elif whole.startswith(spelt) and len(spelt) >= edge:
                self._starts += [self._length + edge] * waiting
                self._stops += [self._length + len(spelt)] * waiting
                edge, waiting = len(spelt), 0
        self._pieces.append(whole)
        self._length += len(whole)

    def _decode(self, start: int, stop: int) -> str:
        return decode(self._tokenizer, self._ids[start:stop])


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of some tokens, with special tokens and without cleaning up spaces."""
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        text = tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    else:
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return str(text)


def map_of_rendering(tokenizer: Any, text: str, token_ids: Sequence[int]) -> TextMap:
    """Return the characters of each token in the text that was tokenized."""
    wanted = list(token_ids)
    if getattr(tokenizer, "is_fast", False):
        for special in (False, True):
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            if list(encoding["input_ids"]) == wanted:
                return _map_of_offsets(text, encoding["offset_mapping"])
    decoded = text_map(tokenizer, wanted)
    if decoded.text != text:
        raise SpecError(
            "",
            "the prompt's tokens are not those of the chat as its template renders it (a prompt "
            "that was cut, or has images, is not)",
        )
    return decoded


def _map_of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> TextMap:
    starts: list[int] = []
    stops: list[int] = []
    reached = 0
    for start, stop in offsets:
        # Special tokens that the tokenizer adds have the offsets (0, 0) at any position.
        starts.append(start if stop > start else reached)
        stops.append(stop if stop > start else reached)
        reached = stops[-1]
    return TextMap(text, tuple(starts), tuple(stops))
