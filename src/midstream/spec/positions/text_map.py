"""The prompt's text and where in it each token is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextMap:
    """A text and, for each token, the half-open span of characters that it stands for.

    Tokens that only together make up a character share the span of all of them. A token may stand
    for no character. Starts and stops ascend (not strictly).

    Attributes:
        text: all of the prompt, special tokens spelt out.
        starts: per token, where in `text` it begins.
        stops: per token, where it ends.

    Raises:
        ValueError: starts and stops differ in number, or are not such.
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
        """How many tokens there are."""
        return len(self.starts)

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens that have a character of `text[start:stop]`: the first, and past the last."""
        first = bisect_right(self.stops, start)
        return (first, first if start >= stop else max(first, bisect_left(self.starts, stop)))

    def find(self, wanted: str) -> list[tuple[int, int]]:
        """The tokens of each occurrence that begins and ends where tokens do.

        Whitespace between a token's edge and the occurrence does not matter. Occurrences are in
        the order in which they begin, and may overlap.

        Args:
            wanted: at least one character.

        Returns:
            For each its first token, and past the last.
        """
        found = []
        text = self.text
        # Only where a token begins can an occurrence begin, so that the text is read once.
        for start, stop in dict.fromkeys(zip(self.starts, self.stops, strict=True)):
            for begin in range(start, stop):
                if text.startswith(wanted, begin) and self._ends(begin + len(wanted)):
                    found.append(self.tokens(begin, begin + len(wanted)))
                if not text[begin].isspace():
                    break
        return found

    def around(self, wanted: str) -> list[str] | None:
        """What the tokens spell where the text first is, with one on each side; None: nowhere."""
        begin = self.text.find(wanted)
        if begin < 0:
            return None
        first, stop = self.tokens(begin, begin + len(wanted))
        shown = slice(max(0, first - 1), stop + 1)
        spans = dict.fromkeys(zip(self.starts[shown], self.stops[shown], strict=True))
        return [self.text[start:end] for start, end in spans]

    def _ends(self, end: int) -> bool:
        """Whether the token that has the character before has only whitespace from here on."""
        rest = self.text[end : self.stops[bisect_left(self.starts, end) - 1]]
        return not rest or rest.isspace()
