"""Generated blocks of Markdown, between two comments that name them.

<!-- made: NAME -->
…
<!-- end: NAME -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Return the text with the contents of each named block replaced.

    Raises:
        ValueError: the text does not have exactly one block of a name.
    """
    for name, body in blocks.items():
        start, end = f"<!-- made: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(start) + r".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"expected one block {start} … {end}")
        inside = f"\n\n{body.strip()}\n\n" if body.strip() else "\n"
        text = pattern.sub(lambda _, made=f"{start}{inside}{end}": made, text)
    return text


def stale(pages: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the pages whose blocks differ from these, by path from the repository's root."""
    return [page for page, blocks in pages.items() if fill(_read(page), blocks) != _read(page)]


def main(pages: Mapping[str, Mapping[str, str]], description: str | None) -> int:
    """Write the blocks to their pages, or only compare with --check. Return the exit status."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    options = parser.parse_args()
    changed = stale(pages)
    for page in changed:
        sys.stdout.write(f"{page} {'differs' if options.check else 'written'}\n")
        if not options.check:
            (ROOT / page).write_text(fill(_read(page), pages[page]), encoding="utf-8")
    return int(options.check and bool(changed))


def table(head: list[str], rows: list[list[str]], numbers: bool = False) -> str:
    """Return a Markdown table; with `numbers` all columns but the first are right-aligned."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")
