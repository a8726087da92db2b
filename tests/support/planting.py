"""Planting of faults: their places are found by name and syntax tree, wherever the code stands.

A place does not depend on files, line breaks, indentation, comments, quotes or parentheses.
"""

import ast
import copy
import functools
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from support.faults import Fault
from support.syntax import SUITES, parse, statements, tree_of_text

# What may have a name of its own, and so be in a fault's `where`.
_NAMED = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^[ \t]*(\w+)[ \t]*[:=]", re.MULTILINE
)
# Completions of headers, and where the completed statements are.
_HEADERS = {
    "{}\n pass": "",
    "try:\n pass\n{}\n pass": "handlers",
}


class NoPlaceError(Exception):
    """A fault has no place, or several; the text says what to write instead."""


class Code(NamedTuple):
    """Statements or one expression; if it is open, the last is a header, whose body is any."""

    nodes: Sequence[ast.AST]
    is_open: bool = False

    @property
    def is_expression(self) -> bool:
        return len(self.nodes) == 1 and isinstance(self.nodes[0], ast.expr)


class Place(NamedTuple):
    """Where the code of a fault stands."""

    path: Path  # below the package
    nodes: Sequence[ast.AST]  # of the file's tree
    before: Code
    after: Code
    fills: bool  # the nodes are all statements of their body
    string: ast.JoinedStr | None  # that has the expression


class Package:
    """The text and names of the package in a folder."""

    def __init__(self, root: Path) -> None:
        self._texts = {
            path.relative_to(root): path.read_text() for path in sorted(root.rglob("*.py"))
        }
        self._name = root.name
        self._users: dict[str, set[Path]] = defaultdict(set)
        for path, text in self._texts.items():
            for names in _NAMED.findall(text):
                self._users["".join(names)].add(path)

    def text(self, path: Path) -> str:
        """Return the text of a file below the package."""
        return self._texts[path]

    def plant(self, fault: Fault) -> tuple[Path, str]:
        """Return the file of a fault, below the package, and its text with the fault."""
        place = self.place(fault)
        before = self._texts[place.path]
        text = _planted(before, place)
        start, stop = self._around(place)
        parse(text[start : len(text) - len(before) + stop])
        return place.path, text

    def _around(self, place: Place) -> tuple[int, int]:
        """Return where the statements of a module that have a fault's place begin and end."""
        text = self._texts[place.path]
        lines = place.nodes[0].lineno, place.nodes[-1].end_lineno
        body = [
            node
            for node in tree_of_text(text).body
            if _first_line(node) <= lines[1] and node.end_lineno >= lines[0]
        ]
        return _offset(text, _first_line(body[0]), 0), _offset(text, body[-1].end_lineno + 1, 0)

    def place(self, fault: Fault) -> Place:
        """Return where a fault is planted; its name must be in one module, its code there once."""
        before, after = read_pair(fault.before, fault.after)
        path = self._path_of(fault.where)
        scope = self._scopes(path)[fault.where.rpartition(":")[2]]
        places = [
            Place(path, nodes, before, after, fills, string)
            for nodes, fills, string in _matches(scope, before)
        ]
        if len(places) == 1:
            return places[0]
        lines = ", ".join(str(place.nodes[0].lineno) for place in places)
        raise NoPlaceError(
            f"`{fault.where}` in {path} has this code {len(places)} times"
            + (f", in lines {lines}: write more of it" if places else "")
            + f":\n{fault.before}"
        )

    def _path_of(self, where: str) -> Path:
        """Return the one file that has a name."""
        module, _, name = where.rpartition(":")
        paths = self._paths_of(name)
        chosen = [path for path in paths if _ends(self._module(path), module)]
        if len(chosen) == 1:
            return chosen[0]
        if not paths:
            raise NoPlaceError(f"nothing is named `{name}`")
        addresses = ", ".join(f"`{self._module(path)}:{name}`" for path in chosen or paths)
        raise NoPlaceError(f"`{where}` is in {len(chosen)} modules; write one of {addresses}")

    def _paths_of(self, name: str) -> list[Path]:
        """Return the files that have a name; all for no name, which is a module's whole."""
        if not name:
            return list(self._texts)
        users = [self._users.get(part, set()) for part in name.split(".")]
        return sorted(path for path in set.intersection(*users) if name in self._scopes(path))

    def _module(self, path: Path) -> str:
        parts = (self._name, *path.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cache  # noqa: B019 - a package lives as long as the process
    def _scopes(self, path: Path) -> dict[str, list[ast.AST]]:
        """Return what has a name in a file, by qualified name; the module's is empty."""
        tree = tree_of_text(self._texts[path])
        scopes: dict[str, list[ast.AST]] = defaultdict(list, {"": [tree]})
        for name, node in _named(tree, ""):
            scopes[name].append(node)
        return scopes


def read_pair(before: str, after: str) -> tuple[Code, Code]:
    """Return the code of a fault, as expressions if both are; a header must become a header."""
    first, second = _read(before), _read(after)
    if first.is_open != second.is_open:
        raise NoPlaceError(f"a header, and none:\n{before}\n{after}")
    if not all(
        len(code.nodes) == 1 and isinstance(code.nodes[0], ast.Expr) for code in (first, second)
    ):
        return first, second
    return Code([first.nodes[0].value]), Code([second.nodes[0].value])


def _read(text: str) -> Code:
    text = textwrap.dedent(text).strip()
    try:
        return Code(ast.parse(text).body)
    except SyntaxError:
        for completion, field in _HEADERS.items():
            try:
                tree = ast.parse(completion.format(re.sub(r"^elif\b", "if", text)))
            except SyntaxError:
                continue
            return Code(getattr(tree.body[0], field) if field else tree.body, is_open=True)
        raise


def _ends(module: str, end: str) -> bool:
    return not end or module == end or module.endswith(f".{end}")


def _named(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield what is defined in a node, at any depth, with its qualified name."""
    for child in statements(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield outer + child.name, child
            yield from _named(child, f"{outer}{child.name}.")
            continue
        if isinstance(node, (ast.Module, ast.ClassDef)) and isinstance(
            child, (ast.Assign, ast.AnnAssign)
        ):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((outer + one.id, child) for one in targets if isinstance(one, ast.Name))
        yield from _named(child, outer)


def _matches(
    scope: list[ast.AST], code: Code
) -> Iterator[tuple[Sequence[ast.AST], bool, ast.JoinedStr | None]]:
    """Yield the nodes that have this code, whether they fill a body, and the f-string around."""
    if code.is_expression:
        wanted = _dump(code.nodes[0])
        for node, string in _walk(scope):
            if type(node) is type(code.nodes[0]) and _dump(node) == wanted:
                yield [node], False, string
        return
    count = len(code.nodes)
    for suite in itertools.chain.from_iterable(_suites([node]) for node in scope):
        for start in range(len(suite) - count + 1):
            nodes = suite[start : start + count]
            if _is_same(nodes, code):
                yield nodes, count == len(suite), None


def _walk(
    nodes: Sequence[ast.AST], string: ast.JoinedStr | None = None
) -> Iterator[tuple[ast.AST, ast.JoinedStr | None]]:
    """Yield all nodes below some, each with the outermost f-string around it."""
    for node in nodes:
        yield node, string
        within = string or (node if isinstance(node, ast.JoinedStr) else None)
        yield from _walk(list(ast.iter_child_nodes(node)), within)


def _suites(nodes: Sequence[ast.AST]) -> Iterator[Sequence[ast.AST]]:
    """Yield a list of statements, and all lists of statements within these."""
    yield nodes
    for node in nodes:
        for field in SUITES:
            suite = getattr(node, field, None)
            if isinstance(suite, list):
                yield from _suites(suite)


def _is_same(nodes: Sequence[ast.AST], code: Code) -> bool:
    for node, wanted in zip(nodes, code.nodes, strict=True):
        if type(node) is not type(wanted):
            return False
        is_open = code.is_open and wanted is code.nodes[-1]
        if _dump(node, is_open=is_open) != _dump(wanted, is_open=is_open):
            return False
    return True


def _dump(node: ast.AST, *, is_open: bool = False) -> str:
    """Return the tree of a node as text, without its suites if it is open."""
    if is_open:
        node = copy.copy(node)
        for field in SUITES:
            if hasattr(node, field):
                setattr(node, field, [])
    # What is assigned is the same expression as what is read.
    return re.sub(r"\b(Store|Del)\(\)", "Load()", ast.dump(node))


def _planted(text: str, place: Place) -> str:
    """Return a file's text with the code rewritten; later lines keep their numbers, if it fits."""
    if place.before.is_expression:
        node, made = place.nodes[0], place.after.nodes[0]
        if place.string is not None:  # parts of f-strings have no place of their own
            made = copy.deepcopy(place.string, {id(node): made})
            node = place.string
        start, stop = _start(text, node), _stop(text, node)
        lost = text.count("\n", start, stop)
        return text[:start] + f"({ast.unparse(made)}" + "\n" * lost + ")" + text[stop:]
    start = _start(text, place.nodes[0])
    indent = " " * (start - text.rfind("\n", 0, start) - 1)
    code = "\n".join(ast.unparse(node).strip("\n") for node in place.after.nodes)
    if place.after.is_open:
        code = code.removesuffix("pass").rstrip()
        stop = _start(text, place.nodes[-1].body[0])
    else:
        code = code or ("pass" if place.fills else "")
        stop = _stop(text, place.nodes[-1])
    code = ("el" if text.startswith("elif", start) else "") + textwrap.indent(code, indent).lstrip()
    lines = text.count("\n", start, stop) - code.count("\n")
    if place.after.is_open:
        inner = text[text.rfind("\n", 0, stop) + 1 : stop]
        code += " " if inner.strip() else "\n" * max(lines, 1) + inner
    else:
        code += "\n" * lines
    return text[:start] + code + text[stop:]


def _start(text: str, node: ast.AST) -> int:
    """Return where a node's text begins, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    if decorators:
        return text.rfind("@", 0, _start(text, decorators[0]))
    return _offset(text, node.lineno, node.col_offset)


def _stop(text: str, node: ast.AST) -> int:
    return _offset(text, node.end_lineno, node.end_col_offset)


def _first_line(node: ast.AST) -> int:
    return min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))


def _offset(text: str, line: int, column: int) -> int:
    """Return an offset of characters from a line, from 1, and a column in bytes of UTF-8."""
    lines = text.split("\n")
    before = sum(len(other) + 1 for other in lines[: line - 1])
    return before + len("".join(lines[line - 1 : line]).encode()[:column].decode())
