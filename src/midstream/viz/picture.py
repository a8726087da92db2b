"""One picture: HTML for notebooks, text for terminals, and a page of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.viz.markup import escape, tag
from midstream.viz.theme import PAGE_CSS, SCRIPT, source_of, style_sheet


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture; a notebook shows it, and `print` writes it as text.

    Attributes:
        title: its title; may be empty.
        body: the figure as HTML, without style sheet and script.
        text: the same as plain text.
    """

    title: str
    body: str
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<div><style>{style_sheet()}</style>{self.body}<script>{SCRIPT}</script></div>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that needs no network, and return its absolute path.

        Args:
            path: the file, usually `*.html`.

        Raises:
            OSError: the file cannot be written.
        """
        file = Path(path).expanduser().resolve()
        file.write_text(document(self.title or "midstream", self.body), encoding="utf-8")
        return file


def document(title: str, body: str, *, css: str = PAGE_CSS, data: Sequence[str] = ()) -> str:
    """Return a page of escaped HTML and `data_block`s that runs only the script of pictures."""
    style = style_sheet() + css
    policy = (
        f"default-src 'none'; style-src {source_of(style)}; script-src {source_of(SCRIPT)};"
        " base-uri 'none'; form-action 'none'"
    )
    head = "\n".join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            tag("title", escape(title)),
            f"<style>{style}</style>",
        ]
    )
    blocks = "\n".join(data)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body class="midstream">\n'
        f"<main>{body}</main>\n{blocks}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def figure(title: str, content: str, cls: str = "midstream") -> str:
    caption = tag("figcaption", escape(title)) if title else ""
    return tag("figure", caption + content, cls)


def cell(element: str, role: str, content: str, label: str, style: str, is_first: bool) -> str:
    """Return what a picture's script tells: content and its label; the first takes the focus."""
    named = {"role": role, "title": label, "aria_label": label}
    focus = "0" if is_first else None
    return tag(element, escape(content), f"c {style}".strip(), **named, tabindex=focus)


def readout(what: str, legend: str = "") -> str:
    """Return the line below a picture, which screen readers skip, for what is pointed at."""
    out = tag("div", escape(f"Point at {what} for its numbers."), "readout", aria_hidden="true")
    return tag("div", out + legend, "foot")


def columns_of(lines: Sequence[Sequence[str]], most_rows: int = 60, most_columns: int = 18) -> str:
    """Return lines of cells as aligned text; the middle of a large table is left out, as `…`."""
    rows = [_elided(line, most_columns) for line in _elided(lines, most_rows, ["…"])]
    count = max(map(len, rows), default=0)
    widths = [max((len(row[n]) for row in rows if n < len(row)), default=0) for n in range(count)]
    return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)


def _elided(items: Sequence, most: int, gap: object = "…") -> list:  # type: ignore[type-arg]
    if len(items) <= most:
        return list(items)
    return [*items[: most - most // 3], gap, *items[len(items) - most // 3 :]]
