"""Prints every file of the project with the first line of what it says of itself."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DOCSTRING = re.compile(r'(#.*\n|\s)*r?""".*?"""', re.DOTALL)
FOLDERS = ("src/midstream", "examples", "scripts", "benchmarks")


def tree() -> str:
    """One line per folder and file."""
    lines = []
    for folder in FOLDERS:
        root = ROOT / folder
        lines.append(_line(0, f"{folder}/", root))
        lines += _below(root, 1)
    return "\n".join(lines)


def _below(folder: Path, depth: int) -> list[str]:
    lines = []
    entries = [path for path in folder.iterdir() if not path.name.startswith((".", "__pycache__"))]
    for path in sorted(entries, key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and any(path.glob("*.py")):
            lines.append(_line(depth, f"{path.name}/", path))
            lines += _below(path, depth + 1)
        elif path.suffix in (".py", ".sh") and path.name != "__init__.py":
            lines.append(_line(depth, path.name, path))
    return lines


def _line(depth: int, name: str, path: Path) -> str:
    return f"{'  ' * depth + name:<30} {_says(path)}".rstrip()


def _says(path: Path) -> str:
    """The first line of what a file says of itself."""
    if path.is_dir():
        path = path / "__init__.py"
        if not path.exists():
            return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        comments = [line[2:] for line in text.splitlines()[1:] if line.startswith("# ")]
        return comments[0] if comments else ""
    begin = _DOCSTRING.match(text)  # ten times as fast as to parse the whole file
    docstring = ast.get_docstring(ast.parse(begin[0] if begin else text)) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(tree() + "\n")
