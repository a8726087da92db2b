"""One picture: HTML for notebooks, text for terminals, and a page of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from midstream.validation import check_suffix
from midstream.viz.markup import escape, tag
from midstream.viz.theme import PAGE_CSS, source_of, style_sheet


class Picture:
    """A picture; a notebook shows it, and `print` writes it as text.

    Attributes:
        title: its title; may be empty.
        text: the same as plain text.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".html",)

    def __init__(self, title: str, text: str, body: str = "") -> None:
        self.title, self.text, self._body = title, text, body

    @property
    def body(self) -> str:
        """The figure as HTML, without style sheet and script."""
        return self._body

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        page = f"<div><style>{style_sheet()}</style>{self.body}</div>"
        return {"text/html": page, "text/plain": self.text}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file of the kind that the name's suffix says, and return its absolute path.

        A chart is written as `.svg`, `.pdf`, `.png` or `.html`; text coloured by token as `.html`,
        a page that needs no network.

        Raises:
            SpecError: the suffix is not one of these.
            MissingExtraError: it is a chart, and matplotlib is not installed.
            OSError: the file cannot be written.
        """
        file = Path(check_suffix(path, *self.suffixes)).expanduser().resolve()
        file.write_bytes(self.encode(file.suffix.lower()))
        return file

    def encode(self, suffix: str) -> bytes:
        """Return the contents of a file with this suffix."""
        return document(self.title or "midstream", self.body).encode()


def document(title: str, body: str, *, css: str = PAGE_CSS, data: Sequence[str] = ()) -> str:
    """Return a page of escaped HTML and `data_block`s that loads and runs nothing."""
    style = style_sheet() + css
    policy = (
        f"default-src 'none'; style-src {source_of(style)}; img-src data:; base-uri 'none';"
        " form-action 'none'"
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
        f"<main>{body}</main>\n{blocks}\n</body>\n</html>\n"
    )


def figure(title: str, content: str, cls: str = "midstream") -> str:
    caption = tag("figcaption", escape(title)) if title else ""
    return tag("figure", caption + content, cls)


def details(numbers: str) -> str:
    """Return what opens to the numbers of a picture, by keyboard and touch too."""
    return tag("details", tag("summary", "Numbers") + tag("pre", escape(numbers), "numbers"))


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
