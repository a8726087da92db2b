"""Check of midstream's seams against the sources of a vLLM release, without importing them."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midstream.runtime.vllm.seam_lines import Fields, Seam

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.syntax import tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Finding:
    """One seam in one release.

    Attributes:
        name: full name of the seam.
        why: what midstream uses it for.
        problem: the difference from what midstream expects; None if there is none.
    """

    name: str
    why: str
    problem: str | None


class Release:
    """The sources of one release.

    Args:
        root: the release's `vllm` folder.

    Attributes:
        version: full version of the release.
    """

    def __init__(self, root: Path) -> None:
        self._base = root.parent
        found = re.search(r"= '(\d+\.\d+[^']*)'", (root / "_version.py").read_text("utf-8"))
        assert found, "vLLM's _version.py is not as expected"
        self.version = found[1]
        self._module = functools.cache(self._parse)
        self._family = functools.cache(self._find_family)
        self._names = functools.cache(self._find_names)

    def check(self, seam: Seam) -> Finding:
        """Check that a function exists and takes the expected parameters."""
        name = f"{seam.module}.{seam.name}"
        function = self._function(seam.module, seam.name)
        if function is None:
            return Finding(name, seam.why, "is missing")
        taken = _parameters(function)
        wanted = list(seam.parameters)
        problem = None
        by_name = [one.arg for one in function.args.kwonlyargs if one.arg in wanted]
        if by_name and taken[: len(wanted)] == wanted:
            taken.insert(taken.index(by_name[0]), "*")
        if taken[: len(wanted)] != wanted:
            problem = f"takes ({', '.join(taken)}), expected ({', '.join(wanted)}, …)"
        lacking = [one for one in seam.named if one not in taken]
        if lacking:
            problem = f"takes no {', '.join(lacking)}"
        extra = [one for one in _required(function) if one not in (*wanted, *seam.named)]
        if problem is None and seam.called and extra:
            problem = f"requires {', '.join(extra)}, which midstream does not pass"
        return Finding(name, seam.why, problem)

    def check_fields(self, fields: Fields) -> Finding:
        """Check that a class, or a module, has the expected attributes."""
        name = f"{fields.module}.{fields.owner}".rstrip(".")
        known = self._names(fields.module, fields.owner)
        if known is None:
            return Finding(name, fields.why, "is missing")
        lacking = [one for one in fields.names if one not in known]
        if not fields.is_in(self.version):
            early = [one for one in fields.names if one in known]
            when = f"{fields.since or 'the first'} to {fields.until or 'the last'}"
            problem = f"has {', '.join(early)}, expected from {when} only" if early else None
            return Finding(name, fields.why, problem)
        return Finding(name, fields.why, f"has no {', '.join(lacking)}" if lacking else None)

    def _parse(self, module: str) -> ast.Module | None:
        path = self._base.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return tree_of(file)
        return None

    def _function(self, module: str, name: str) -> Function | None:
        owner, _, method = name.rpartition(".")
        if not owner:
            found = self._find(module, method)
            return found[1] if found and isinstance(found[1], _FUNCTIONS) else None
        for _, cls in self._family(module, owner):
            functions = [item for item in cls.body if isinstance(item, _FUNCTIONS)]
            overloads = [one for one in functions if one.name == method]
            if overloads:
                return overloads[-1]
        return None

    def _find_names(self, module: str, owner: str) -> set[str] | None:
        if not owner:
            tree = self._module(module)
            return None if tree is None else set(_defined(tree.body))
        family = self._family(module, owner)
        if not family:
            return None
        return {name for _, cls in family for name in (*_defined(cls.body), *_set_on_self(cls))}

    def _find_family(self, module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """Return a class and its bases within vLLM, each with its module."""
        found = self._find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        home, cls = found
        family = [(home, cls)]
        for base in cls.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(inner, ast.Name):
                family += self._family(home, inner.id)
        return family

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return the module that defines a function or class, and the definition; None if the
        module neither defines nor imports it.
        """
        tree = self._module(module)
        if tree is None:
            return None
        for item in _statements(tree.body):
            if isinstance(item, (ast.ClassDef, *_FUNCTIONS)) and item.name == name:
                return module, item
            if isinstance(item, ast.ImportFrom) and item.module and not item.level:
                for alias in item.names:
                    if (alias.asname or alias.name) == name and item.module.startswith("vllm"):
                        return self._find(item.module, alias.name)
        return None


def _parameters(function: Function) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _required(function: Function) -> list[str]:
    """Return the names of the parameters without a default."""
    given = function.args
    by_place = [*given.posonlyargs, *given.args]
    by_place = by_place[: len(by_place) - len(given.defaults)]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    by_name = [one for one, default in pairs if default is None]
    names = [one.arg for one in (*by_place, *by_name)]
    return [name for name in names if name not in ("self", "cls")]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module's or class's body, including its branches."""
    for item in body:
        yield item
        if isinstance(item, ast.If):
            yield from _statements([*item.body, *item.orelse])
        elif isinstance(item, ast.Try):
            yield from _statements([*item.body, *item.orelse, *item.finalbody])


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that the body of a module or class defines, imports, assigns or annotates."""
    for item in _statements(body):
        if isinstance(item, (ast.ClassDef, *_FUNCTIONS)):
            yield item.name
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        elif isinstance(item, ast.Assign):
            yield from (one.id for one in item.targets if isinstance(one, ast.Name))
        elif isinstance(item, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in item.names)


def _set_on_self(cls: ast.ClassDef) -> Iterator[str]:
    for item in ast.walk(cls):
        if (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and isinstance(item.value, ast.Name)
            and item.value.id == "self"
        ):
            yield item.attr
