"""Writes the list of files in CONTRIBUTING.md from the first line of each file's own docstring.

scripts/tree.py [--check]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import markers

FOLDERS = ("src/midstream", "examples", "scripts", "benchmarks")


def pages() -> dict[str, dict[str, str]]:
    """Every block, by page."""
    return {"CONTRIBUTING.md": {"tree": tree()}}


def tree() -> str:
    """One line per folder and file."""
    lines = []
    for folder in FOLDERS:
        root = markers.ROOT / folder
        lines.append(_line(0, f"{folder}/", root))
        lines += _below(root, 1)
    return "```text\n" + "\n".join(lines) + "\n```"


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
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
