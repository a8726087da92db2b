"""Descriptions of registered vectors, as tables and JSON, without the numbers."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN_TAPS = 4


@dataclass(frozen=True, slots=True)
class Description:
    """Description of one registered name."""

    name: str
    taps: tuple[tuple[str, int] | None, ...]  # sorted by layer; None: a single vector without a tap
    norms: tuple[float, ...]  # Euclidean, in the order of `taps`; empty for whole edits
    width: int
    digest: str  # SHA-256 of taps and vectors or edits, in hex: equal if and only if these are
    registered: int  # how often: 1 if it was never replaced
    edits: tuple[str, ...] = ()  # operation of each whole edit, in order; empty for vectors

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `edits` only for whole edits."""
        return {
            "name": self.name,
            "taps": [None if tap is None else list(tap) for tap in self.taps],
            "norms": list(self.norms),
            "width": self.width,
            "digest": self.digest,
            "registered": self.registered,
            **({"edits": list(self.edits)} if self.edits else {}),
        }

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row under `HEADINGS`."""
        return (
            self.name,
            _join([show_tap(tap) for tap in self.taps]),
            _join([f"{norm:.4g}" for norm in self.norms]),
            str(self.width),
            self.digest[:8],
            str(self.registered),
            ", ".join(f"{count} {op}" for op, count in Counter(self.edits).items()),
        )

    def __str__(self) -> str:
        return str(Listing((self,)))

    def _repr_html_(self) -> str:
        return Listing((self,))._repr_html_()


HEADINGS = ("name", "taps", "norms", "width", "digest", "registered", "edits")


class Listing(tuple[Description, ...]):
    """Descriptions sorted by name; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [description.cells() for description in self]
        return text_table(HEADINGS, rows) if rows else "no named vectors"

    def _repr_html_(self) -> str:
        rows = [description.cells() for description in self]
        return html_table(HEADINGS, rows) if rows else "<p>no named vectors</p>"


def show_tap(tap: tuple[str, int] | None) -> str:
    """Return a tap for display: `resid_post.15`."""
    return "any" if tap is None else f"{tap[0]}.{tap[1]}"


def _join(parts: Sequence[str]) -> str:
    if len(parts) <= _SHOWN_TAPS:
        return ", ".join(parts)
    return f"{', '.join(parts[: _SHOWN_TAPS - 1])}, … {parts[-1]} ({len(parts)})"


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain-text table with columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]
    return "\n".join(lines)


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; headings and cells are escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', headings)}</thead><tbody>{body}</tbody></table>"
