"""Tables of what lenses gave, as plain text and as HTML for notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class LensCell(NamedTuple):
    """A cell: its text, and the probability by which notebooks colour it, 0 to 1."""

    text: str
    probability: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class LensTable:
    """A table; prints as plain text, and is coloured by probability in a notebook."""

    headings: Sequence[str]
    lines: Sequence[Sequence[LensCell]]
    column_title: str = ""

    def __str__(self) -> str:
        rows = [list(self.headings), *([cell.text for cell in line] for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from midstream import viz

        first, *columns = self.headings
        picture = viz.heatmap(
            [[cell.probability or math.nan for cell in line[1:]] for line in self.lines],
            [line[0].text for line in self.lines],
            columns,
            title="" if first == "layer" else first,
            row_title="layer",
            column_title=self.column_title,
            center=None,
            limits=(0, 1),
            fmt=".3f",
            texts=[[cell.text for cell in line[1:]] for line in self.lines],
        )
        return picture._repr_html_()


def token_cell(show: Callable[[int], str], token: int, logprob: float) -> LensCell:
    """Return the cell of a token with its probability."""
    probability = math.exp(logprob)
    return LensCell(f"{show(token)} {100 * probability:.0f}%", probability)


def shown_by(tokenizer: Any) -> Callable[[int], str]:
    """Return the function that shows a token: its text as Python writes it, or its id."""
    if tokenizer is None:
        return str
    return lambda token: repr(tokenizer.decode([token]))
