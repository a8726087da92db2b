"""No function has more than six parameters, but for those that have a reason of their kind."""

import ast
import importlib
import inspect
import re
from pathlib import Path

from support.syntax import statements, tree_of

import midstream

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"
MOST = 6


def parameters(function):
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def functions(node, name):
    """(dotted name, parameters) of each function in a module, nested ones too."""
    for child in statements(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield inner, parameters(child)
            yield from functions(child, inner)
        else:
            yield from functions(child, name)


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_objects():
    """What documents import, what the API reference has, and all else of the packages of these."""
    packages = {midstream.__name__}
    for page in (ROOT / "docs").rglob("*.md"):
        for home, names in re.findall(
            r"^from (midstream\S*) import ([\w, ]+)$", page.read_text(), re.M
        ):
            module = importlib.import_module(home)
            yield from (getattr(module, name) for name in names.replace(" ", "").split(","))
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            home, _, own = name.rpartition(".")
            module = importlib.import_module(home)
            yield getattr(module, own)
            if own in getattr(module, "__all__", ()):
                packages.add(home)
    for name in packages:
        module = importlib.import_module(name)
        for own in module.__all__:
            yield getattr(module, own)


def public_functions():
    """Dotted names of public functions, and of the constructors and methods of public classes."""
    names = set()
    for value in public_objects():
        owners = inspect.getmro(value) if inspect.isclass(value) else ()
        members = [
            getattr(member, "__func__", member)
            for owner in owners
            for name, member in vars(owner).items()
            if name == "__init__" or not name.startswith("_")
        ]
        for member in (value, *members):
            if inspect.isfunction(member):
                plain = inspect.unwrap(member)
                names.add(f"{plain.__module__}.{plain.__qualname__}")
    return names


def is_command(path):
    """Whether Typer reads the parameters of a module's functions as options of a command."""
    return "cli" in (path.parent.name, path.stem)


def is_kernel(path):
    """Whether a module has a kernel, its launcher or its reference, which take many sizes."""
    return path.is_relative_to(PACKAGE / "ops") or "triton.jit" in path.read_text()


def test_no_function_has_more_than_six_parameters():
    public = public_functions()
    assert {"midstream.api.llm.LLM.generate", "midstream.plan.probe.Probe.__init__"} <= public
    long = {}
    for path in PACKAGE.rglob("*.py"):
        if is_command(path) or is_kernel(path):
            continue
        for name, names in functions(tree_of(path), module_of(path)):
            if len(names) > MOST and name not in public:
                long[name] = names
    assert long == {}


def test_parameters_are_counted_in_every_kind_of_function():
    source = """
class A:
    def method(self, a, /, b, *, c): ...
    @classmethod
    async def other(cls, a, *args, b=1, **rest):
        def inner(self, a): ...
"""
    assert dict(functions(ast.parse(source), "m")) == {
        "m.A.method": ["a", "b", "c"],
        "m.A.other": ["a", "b"],
        "m.A.other.inner": ["a"],
    }
