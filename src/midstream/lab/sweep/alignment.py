"""Alignment of two prompts: which source position each target position is patched from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from midstream.errors import SpecError
from midstream.validation import MAX_ITEMS, at, is_int, kind, read_int, read_word

WORDS = ("exact", "suffix", "prefix")
Align = Literal["exact", "suffix", "prefix"] | tuple[tuple[int, int], ...]


def read_align(value: object) -> Align:
    """Read a word, or a mapping {target position: source position} as pairs in its order.

    In JSON the target positions are `str`. Negative positions count from the end of their prompt.
    """
    if not isinstance(value, Mapping):
        word: Literal["exact", "suffix", "prefix"]
        if not isinstance(value, str):
            raise SpecError(
                "",
                'expected "exact", "suffix", "prefix", or {target position: source position}, got '
                f"{kind(value)}",
            )
        word = read_word(value, WORDS)  # type: ignore[assignment]
        return word
    if not 1 <= len(value) <= MAX_ITEMS:
        raise SpecError("", f"expected 1 to {MAX_ITEMS} positions, got {len(value)}")
    pairs = []
    for key, source in value.items():
        with at(f"[{key}]"):
            target = _read_key(key)
            pairs.append((target, read_int(source)))
    return tuple(pairs)


def emit_align(align: Align) -> object:
    """Return the JSON form, which `read_align` reads."""
    return align if isinstance(align, str) else {str(key): value for key, value in align}


def align_positions(align: Align, target: int, source: int) -> dict[int, int]:
    """Return the source position of each target position that has one, for two lengths."""
    if align == "exact":
        if target != source:
            raise SpecError(
                "align",
                f"the prompt has {target} tokens and the source has {source}; give "
                'align="suffix" to match them from their ends, "prefix" from their beginnings, or '
                "{target position: source position}",
            )
        return {position: position for position in range(target)}
    both = min(target, source)
    if align == "prefix":
        return {position: position for position in range(both)}
    if align == "suffix":
        return {target - both + offset: source - both + offset for offset in range(both)}
    aligned: dict[int, int] = {}
    for key, value in align:
        with at(f"align[{key}]"):
            place = _from_start(key, target, "prompt")
            if place in aligned:
                raise SpecError("", f"position {place} of the prompt is given twice")
            aligned[place] = _from_start(value, source, "source")
    return aligned


def counts_from_end(align: Align) -> bool:
    """Return whether source positions are counted from the end of the source prompt."""
    if isinstance(align, str):
        return align == "suffix"
    return any(source < 0 for _, source in align)


def _from_start(position: int, length: int, what: str) -> int:
    if not -length <= position < length:
        raise SpecError(
            "",
            f"position {position} is out of range: the {what} has {length} tokens, so positions go "
            f"from {-length} to {length - 1}",
        )
    return position % length


def _read_key(key: object) -> int:
    if is_int(key):
        return read_int(key)
    if isinstance(key, str) and key.removeprefix("-").isdecimal() and len(key) < 12:
        return read_int(int(key))
    raise SpecError("", f"expected a position of the prompt, `int`, got {kind(key)}")
