"""`TextMap`: a prompt's text and the character span of each token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.plan.positions.prompt_index import TextIndex


@dataclass(frozen=True)
class TextMap:
    """A text and, for each token, its half-open span of characters, maybe empty.

    Tokens that form a character only together share its span. Starts and stops never descend.
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

    @cached_property
    def index(self) -> TextIndex:
        """Finds texts in this one, apart from whitespace at the edges of tokens."""
        from midstream.plan.positions.prompt_index import TextIndex  # imports numpy

        return TextIndex(self.text, self.starts, self.stops)

    def around(self, wanted: str) -> list[str] | None:
        """Return the texts of the tokens around a text's first occurrence; None: there is none."""
        begin = self.text.find(wanted)
        if begin < 0:
            return None
        first, stop = self.tokens(begin, begin + len(wanted))
        shown = slice(max(0, first - 1), stop + 1)
        spans = dict.fromkeys(zip(self.starts[shown], self.stops[shown], strict=True))
        return [self.text[start:end] for start, end in spans]
