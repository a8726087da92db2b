"""The text of a prompt by token, in which texts and chat messages are located."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.text_map import TextMap

# [start, stop), of tokens or characters.
Region = tuple[int, int]

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


def map_of_rendering(
    tokenizer: Any, text: str, token_ids: Sequence[int], media: Sequence[Region] = ()
) -> TextMap:
    """Return the characters of each token in the text that was tokenized.

    Tokens of `media`, [start, stop) of each placeholder in the prompt, share the characters that
    the text has in its place.
    """
    wanted = list(token_ids)
    # Tokenizers of mistral_common say that they are fast, and have no offsets.
    if getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "backend_tokenizer"):
        for special in (False, True):
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            gaps = _gaps(_parts(wanted, media), "".join(map(chr, encoding["input_ids"])))
            if gaps is not None:
                spans = _map_of_offsets(text, encoding["offset_mapping"])
                return _with_media(spans, media, gaps)
    decoded = None if media else text_map(tokenizer, wanted)
    if decoded is None or decoded.text != text:
        why = "a prompt that was cut is not"
        if media:
            why += (
                "; with images it takes a tokenizer with offsets, and a text that tells them apart"
            )
        raise SpecError(
            "",
            f"the prompt's tokens are not those of the chat as its template renders it ({why})",
        )
    return decoded


def _parts(ids: Sequence[int], media: Sequence[Region]) -> list[str]:
    """Return the tokens before, between and after media, a character for each token."""
    bounds = [0, *(bound for region in media for bound in region), len(ids)]
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return ["".join(map(chr, ids[start:stop])) for start, stop in pairs]


def _gaps(parts: list[str], whole: str) -> list[Region] | None:
    """Return what `whole` has between the parts, of which it has all; None: it has not, or there
    are several ways to find them.
    """
    if len(parts) == 1:
        return [] if parts[0] == whole else None
    first, *inner, last = parts
    low, high = len(first), len(whole) - len(last)
    if not (whole.startswith(first) and whole.endswith(last)) or low >= high:
        return None
    from_left, at = [], low
    for part in inner:
        at = whole.find(part, at + 1, high - 1)
        if at < 0:
            return None
        from_left.append((at, at + len(part)))
        at += len(part)
    from_right, at = [], high
    for part in reversed(inner):
        at = whole.rfind(part, low + 1, at - 1)
        from_right.append((at, at + len(part)))
    if from_left != from_right[::-1]:
        return None
    bounds = [low, *(bound for region in from_left for bound in region), high]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _with_media(spans: TextMap, media: Sequence[Region], gaps: Sequence[Region]) -> TextMap:
    """Return the characters of a prompt's tokens, by those of the tokens that have `gaps` in place
    of media.
    """
    starts: list[int] = []
    stops: list[int] = []
    reached = 0
    for (start, stop), (first, end) in zip(media, gaps, strict=True):
        count = stop - start
        starts += [*spans.starts[reached:first], *([spans.starts[first]] * count)]
        stops += [*spans.stops[reached:first], *([spans.stops[end - 1]] * count)]
        reached = end
    starts += spans.starts[reached:]
    stops += spans.stops[reached:]
    return TextMap(spans.text, tuple(starts), tuple(stops))


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
