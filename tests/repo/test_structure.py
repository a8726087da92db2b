"""The repository keeps the shape that it says it has."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import midstream
from midstream import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 500
# Who may import vLLM: the runtime, what is a vLLM class itself, and the demo's engine.
VLLM = ("runtime/", "llm.py", "async_llm.py", "sampling.py", "demo/engine.py")
# What is free of vLLM, in so many words (DESIGN, STYLE 6), and what each is free of besides.
FREE = {
    "spec/": {"vllm", "torch"},
    "ops/": {"vllm"},
    "transport/": {"vllm"},
    "codecs/": {"vllm"},
    "store/": {"vllm"},
    "sinks/": {"vllm"},
    "export/": {"vllm"},
    "planning/": {"vllm"},
    "config.py": {"vllm", "torch", "numpy"},
    "errors.py": {"vllm", "torch", "numpy"},
    "sites.py": {"vllm", "torch", "numpy"},
    "receipt.py": {"vllm", "torch", "numpy"},
    "__init__.py": {"vllm", "torch", "numpy"},
    "plugin.py": {"vllm", "torch", "numpy"},
}
# Pure data, as `conventions_types.py` says of itself.
FREE |= dict.fromkeys(
    (
        "runtime/models/convention.py",
        "runtime/models/vllm_layers.py",
        "runtime/models/hf_layers.py",
    ),
    {"vllm", "torch", "numpy"},
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def imports(path: Path) -> set[str]:
    """The top-level packages that a module imports, anywhere in it, but for type checkers only."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                walk(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    found.add(str(argument.value).split(".")[0])
        for inner in ast.iter_child_nodes(node):
            walk(inner)

    walk(ast.parse(path.read_text()))
    return found


def test_the_sources_are_where_this_looks_for_them():
    assert len(SOURCES) > 40
    assert imports(PACKAGE / "llm.py") >= {"vllm", "copy"}
    assert "vllm" in imports(PACKAGE / "runtime" / "seams.py"), "imports in functions count"
    assert "vllm" not in imports(PACKAGE / "__init__.py"), "imports for type checkers do not"


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "scripts"])
def test_no_module_is_longer_than_500_lines(folder):
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_only_the_runtime_the_llm_and_the_demos_engine_import_vllm():
    importers = {name_of(path) for path in SOURCES if "vllm" in imports(path)}
    assert {name for name in importers if not name.startswith(VLLM)} == set()
    assert any(name.startswith("runtime/") for name in importers)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_each_layer_is_free_of_what_it_says_it_is_free_of(path):
    banned = set().union(*(found for part, found in FREE.items() if name_of(path).startswith(part)))
    assert imports(path) & banned == set()


LOWER = ("spec/", "ops/", "transport/", "codecs/", "store/", "export/", "sinks/", "planning/")


def test_the_lower_layers_do_not_reach_into_the_runtime():
    # Arrows point down: runtime → transport → nothing; runtime → spec → nothing.
    pattern = re.compile(r"^\s*(?:from|import) midstream\.(runtime|llm|demo)", re.MULTILINE)
    for path in SOURCES:
        if name_of(path).startswith(LOWER):
            assert not pattern.search(path.read_text()), name_of(path)


# ---------------------------------------------------------------- what is public


@pytest.mark.parametrize("name", midstream.__all__)
def test_every_public_name_resolves(name):
    assert getattr(midstream, name) is not None
    assert name in dir(midstream)


def test_each_public_name_is_there_once():
    assert len(set(midstream.__all__)) == len(midstream.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'midstream' has no attribute 'Llm'"):
        _ = midstream.Llm


def test_the_installed_version_is_the_packages():
    from importlib.metadata import version

    assert version("midstream") == midstream.__version__


# ---------------------------------------------------------------- exceptions


def exceptions():
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and not issubclass(value, Warning)
        and value.__module__ == errors.__name__
    }


def drawn():
    """{name: (its parent in the tree, the builtin that it also is)}, from the docstring."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:  |$)", line)
        if match and match[2].endswith("Error"):
            depth = len(match[1]) // 4
            del above[depth:]
            found[match[2]] = (above[-1] if above else None, match[3])
            above.append(match[2])
    return found


def test_the_tree_drawn_at_the_top_has_every_exception_and_no_other():
    assert set(drawn()) == set(exceptions())


@pytest.mark.parametrize("name", exceptions())
def test_each_exception_is_where_the_tree_has_it(name):
    parent, builtin = drawn()[name]
    cls = exceptions()[name]
    assert cls.__doc__
    if parent is None:
        assert cls.__bases__ == (Exception,)
    else:
        assert exceptions()[parent] in cls.__bases__
    if builtin:
        assert issubclass(cls, getattr(__import__("builtins"), builtin))


def test_every_exception_is_public():
    assert set(exceptions()) <= set(midstream.__all__)


def test_no_exception_is_defined_elsewhere():
    defined = {
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and path.name != "errors.py"
        and any(re.search(r"(Error|Exception)$", ast.unparse(base)) for base in node.bases)
    }
    # A command line's own words, raised and caught within the demo, or within the doctor; and what
    # the server refuses, caught within it.
    own = ("demo/", "doctor/", "models/", "server/http_errors.py: Refusal")
    assert {name for name in defined if not name.startswith(own)} == set()


# ---------------------------------------------------------------- ops


def ops():
    """The public ops: each has an eager `<op>_ref` beside it."""
    return [path.stem.removesuffix("_ref") for path in (PACKAGE / "ops").glob("*_ref.py")]


def test_there_are_ops_and_no_module_beside_them_that_belongs_to_none():
    assert ops()
    others = {path.stem for path in (PACKAGE / "ops").glob("*.py")}
    known = {f"{op}{kind}" for op in ops() for kind in ("", "_ref", "_triton")}
    assert others - known == {"__init__", "layout"}


@pytest.mark.parametrize("op", ops())
def test_each_op_has_its_reference_its_kernel_and_its_tests(op):
    for path in (
        PACKAGE / "ops" / f"{op}.py",
        PACKAGE / "ops" / f"{op}_ref.py",
        PACKAGE / "ops" / f"{op}_triton.py",
        ROOT / "tests" / "ops" / f"test_{op}.py",
        ROOT / "tests" / "gpu" / f"test_{op}_triton.py",
    ):
        assert path.exists(), path


@pytest.mark.parametrize("op", ops())
def test_each_form_of_an_op_takes_the_same_arguments(op):
    wanted = list(
        inspect.signature(getattr(importlib.import_module(f"midstream.ops.{op}"), op)).parameters
    )
    reference = importlib.import_module(f"midstream.ops.{op}_ref")
    assert list(inspect.signature(getattr(reference, f"{op}_ref")).parameters) == wanted
    source = (PACKAGE / "ops" / f"{op}_triton.py").read_text()
    launcher = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == f"{op}_triton"
    )
    assert [argument.arg for argument in launcher.args.args] == wanted
