"""Syntax trees of sources, of which a process parses each text once."""

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path


def parse(text: str) -> ast.Module:
    """Parse a text that nobody else asks for."""
    searches = gc.isenabled()
    gc.disable()  # searches for garbage take most of the time else, and find nothing in a tree
    try:
        return ast.parse(text)
    finally:
        if searches:
            gc.enable()


# Nobody changes a tree that others have too.
tree_of_text = functools.cache(parse)


def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return tree_of_text(path.read_text(encoding="utf-8"))


# Fields of nodes that are lists of statements, or of what has such lists.
SUITES = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements directly below a node, in which alone functions and classes are."""
    for suite in SUITES:
        nodes = getattr(node, suite, None)
        if isinstance(nodes, list):
            yield from nodes


def dotted(node: ast.expr) -> str:
    """Return an expression as text, as `ast.unparse` does; a dotted name in a fraction of the
    time.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


@functools.cache
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree."""
    return tuple(ast.walk(node))


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return walk(tree_of(path))
