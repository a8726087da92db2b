"""Code blocks of the documents."""

from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, languages: Collection[str]) -> list[tuple[int, str, str]]:
    """(line, language, text) of each block of these languages of a page."""
    found: list[tuple[int, str, str]] = []
    fences = {f"```{language}": language for language in languages}
    start, inside = 0, ""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if start and line == "```":
            found.append((start, inside, "\n".join(lines[start : number - 1])))
            start = 0
        elif line in fences:
            start, inside = number, fences[line]
    return found
