"""`TextMap`: a prompt's text and the character span of each token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextMap:
    """A text and, for each token, its half-open span of characters.

    Tokens that form a character only together share its span. A span may be empty. Starts and
    stops ascend, not strictly.

    Attributes:
        text: the whole prompt, including special tokens as text.
        starts: per token, index of its first character in `text`.
        stops: per token, index after its last character.

    Raises:
        ValueError: starts and stops differ in length, do not ascend, or exceed the text.
    """

    text: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.stops):
            raise ValueError(f"{len(self.starts)} starts and {len(self.stops)} stops")
        before = (0, 0)
        for start, stop in zip(self.starts, self.stops, strict=True):
            if start < before[0] or stop < before[1] or not start <= stop <= len(self.text):
                raise ValueError(f"a token at characters {start} to {stop} comes after {before}")
            before = (start, stop)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.starts)

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of tokens with a character in `text[start:stop]`."""
        first = bisect_right(self.stops, start)
        return (first, first if start >= stop else max(first, bisect_left(self.starts, stop)))

    def find(self, wanted: str) -> list[tuple[int, int]]:
        """Return the token ranges of the occurrences that start and end at token boundaries.

        Whitespace between a token boundary and the occurrence is ignored, on either side of the
        boundary: a token that has only whitespace of the occurrence, and goes on beyond it, is no
        part of it. Occurrences are ordered by their start and may overlap.

        Args:
            wanted: at least one character.

        Returns:
            The half-open token range of each occurrence.
        """
        found = []
        text = self.text
        is_blank = wanted.isspace()
        # Occurrences start at token boundaries only, so one pass over the text is enough.
        for start, stop in dict.fromkeys(zip(self.starts, self.stops, strict=True)):
            piece = text[start:stop]
            solid = min(stop - len(piece.lstrip()) + 1, stop)
            tail = stop if is_blank else max(solid, start + len(piece.rstrip()))
            for begin in (*range(start, solid), *range(tail, stop)):
                if text.startswith(wanted, begin):
                    end = self._end(begin + len(wanted), is_blank)
                    # Of whitespace at the end of this token the next one is the first.
                    first = begin if begin < solid else stop
                    if end is not None and first < end:
                        found.append(self.tokens(first, end))
        return found

    def around(self, wanted: str) -> list[str] | None:
        """Return the texts of the tokens at the first occurrence, plus one token on each side.

        None: the text does not occur.
        """
        begin = self.text.find(wanted)
        if begin < 0:
            return None
        first, stop = self.tokens(begin, begin + len(wanted))
        shown = slice(max(0, first - 1), stop + 1)
        spans = dict.fromkeys(zip(self.starts[shown], self.stops[shown], strict=True))
        return [self.text[start:end] for start, end in spans]

    def _end(self, end: int, is_blank: bool) -> int | None:
        """Return where an occurrence up to `end` ends: there, if the token of character `end` − 1
        has only whitespace from there on; where that token starts, if it has only whitespace up to
        there, and the occurrence has more than that; None: within a token.
        """
        token = bisect_left(self.starts, end) - 1
        if not self.text[end : self.stops[token]].strip():
            return end
        start = self.starts[token]
        return None if is_blank or self.text[start:end].strip() else start
