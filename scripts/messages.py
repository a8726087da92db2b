"""Writer of tests/repo/messages.txt: every error message of the package, for whoever reviews one.

    scripts/messages.py [--check]

A message is what an exception is raised with, as it stands in the code; a value in it is in braces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.syntax import tree_of_text, walk

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "midstream"
FILE = ROOT / "tests" / "repo" / "messages.txt"


def messages(source: str) -> Iterator[str]:
    """Yield each message of a module as `Error: message`, in the order of the code."""
    raised = [node.exc for node in walk(tree_of_text(source)) if isinstance(node, ast.Raise)]
    calls = [call for call in raised if isinstance(call, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        texts = [text for value in call.args if (text := template(value)).strip()]
        if texts:
            yield f"{ast.unparse(call.func)}: {' | '.join(texts)}"


def template(value: ast.expr) -> str:
    """Return a text with its values in braces; empty for what is no text."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        parts = (
            ast.unparse(part.value).join("{}")
            if isinstance(part, ast.FormattedValue)
            else str(getattr(part, "value", ""))
            for part in value.values
        )
        return "".join(parts)
    return ""


def text() -> str:
    """Return what the file has: the messages of each module under its name."""
    blocks = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = [" ".join(line.split()) for line in messages(path.read_text())]
        if lines:
            blocks.append("\n  ".join([path.relative_to(PACKAGE).as_posix(), *lines]) + "\n")
    return "\n".join(blocks)


def main(arguments: list[str]) -> int:
    """Write the file, or with --check compare it; return 1 if it is old."""
    new = text()
    if "--check" in arguments:
        return int(FILE.read_text() != new)
    FILE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
