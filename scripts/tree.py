"""Writes the layers and the list of files in CONTRIBUTING.md, from pyproject.toml and docstrings.

scripts/tree.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import markers

_DOCSTRING = re.compile(r'(#.*\n|\s)*r?""".*?"""', re.DOTALL)
FOLDERS = ("src/midstream", "examples", "scripts", "benchmarks")


def pages() -> dict[str, dict[str, str]]:
    """Every block, by page."""
    return {"CONTRIBUTING.md": {"layers": layers(), "tree": tree()}}


def layers() -> str:
    """Return the layers of the package and of `runtime`, the highest first, one per line."""
    text = (markers.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = []
    for layer in contract(text, "layers"):
        lines.append(layer)
        if "runtime" in layer.split():
            lines += [f"    runtime: {inner}" for inner in contract(text, "processes")]
    return "```text\n" + "\n".join(lines) + "\n```"


def contract(text: str, name: str) -> list[str]:
    """Return the layers of one contract of import-linter.

    Args:
        text: pyproject.toml.
        name: name of the contract.

    Raises:
        ValueError: there is no such contract with layers.
    """
    pattern = rf'^name = "{name}"\ntype = "layers"\n(?:\w[^\n]*\n)*?layers = (\[[^]]*\])'
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"pyproject.toml: expected a contract {name!r} with layers, found none")
    names: list[str] = ast.literal_eval(found[1])  # an array of strings is a list in Python too
    return names


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
    begin = _DOCSTRING.match(text)  # ten times as fast as to parse the whole file
    docstring = ast.get_docstring(ast.parse(begin[0] if begin else text)) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
