"""Tables of what lenses gave, as plain text and as HTML for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A cell: its text, and the probability by which notebooks colour it, 0 to 1."""

    text: str
    probability: float = 0.0


@dataclass(frozen=True, slots=True)
class LensTable:
    """A table; prints as plain text, and is coloured by probability in a notebook.

    Attributes:
        headings: of the columns.
        lines: cells of each line.
    """

    headings: Sequence[str]
    lines: Sequence[Sequence[Cell]]

    def __str__(self) -> str:
        rows = [list(self.headings), *([cell.text for cell in line] for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(one)}</th>" for one in self.headings)
        body = "".join(f"<tr>{''.join(map(_html, line))}</tr>" for line in self.lines)
        return f"<table><tr>{head}</tr>{body}</table>"


def _html(cell: Cell) -> str:
    style = ""
    if cell.probability > 0:
        style = f' style="background: rgba(70, 130, 220, {0.7 * cell.probability:.2f})"'
    return f"<td{style}>{html.escape(cell.text)}</td>"


def token_cell(show: Callable[[int], str], token: int, logprob: float) -> Cell:
    """Return the cell of a token with its probability."""
    probability = math.exp(logprob)
    return Cell(f"{show(token)} {100 * probability:.0f}%", probability)


def shown_by(tokenizer: Any) -> Callable[[int], str]:
    """Return the function that shows a token: its text as Python writes it, or its id."""
    if tokenizer is None:
        return str
    return lambda token: repr(tokenizer.decode([token]))
