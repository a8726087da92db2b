"""The structure of the repository: layers, names, sizes, and language."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.syntax import tree_of, walk

import midstream
from midstream import entries, errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_CLASS_LINES = 500, 250
MOST_LINES = {"core": 83_357, "lab": 27_250}
MOST_MODULES = 20
MOST_EXPORTS = 45
# English words that end in -ing and are nouns.
NOUNS = {"string", "steering", "tracing", "listing", "sizing"}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def trees():
    return {path: tree_of(path) for path in SOURCES}


@functools.cache
def scopes():
    """Each module, class and function of the package, with its file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (path, node)
        for path, tree in trees().items()
        for node in walk(tree)
        if isinstance(node, kinds)
    ]


def classes():
    return [
        (name_of(path), node)
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]


def test_modules_import_from_their_own_and_lower_layers_alone():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "0 broken" in done.stdout
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


def test_neither_a_part_nor_a_folder_nor_a_class_grows_unseen():
    """A commit that raises a bound says what the lines buy; one that deletes lowers it."""
    lines = Counter()
    for path in SOURCES:
        part = "lab" if path.is_relative_to(PACKAGE / "lab") else "core"
        lines[part] += path.read_text().count("\n")
    larger = {part: count for part, count in lines.items() if count > MOST_LINES[part]}
    assert larger == {}, f"more lines than {MOST_LINES}: remove some, or raise MOST_LINES"
    counts = Counter(
        path.parent.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        if path.name != "__init__.py"
    )
    larger = {folder: count for folder, count in counts.items() if count > MOST_MODULES}
    assert larger == {}, "divide a folder that grew by what its modules have in common"
    lengths = {
        f"{file}: {node.name}": node.end_lineno - node.lineno + 1 for file, node in classes()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_CLASS_LINES} == {}


def test_private_attributes_are_used_of_vllms_seams_and_torch_alone():
    assert [name_of(path) for path in SOURCES if "noqa: SLF001" in path.read_text()] == []
    names = (ROOT / "pyproject.toml").read_text().partition("extend-ignore-names = [")[2]
    allowed = set(re.findall(r'"(\w+)"', names.partition("]")[0]))
    seams = (PACKAGE / "runtime" / "vllm" / "seams.txt").read_text()
    assert {name for name in allowed if not re.search(rf"[.{{ ]{name}\b", seams)} == {
        "_C",
        "_disabled_torch_function_impl",
        "_version",
    }


def test_no_module_is_longer_than_500_lines():
    folders = ("src", "tests", "benchmarks", "examples", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    longer = {name: n for name, n in lengths.items() if n > MAX_LINES}
    assert longer == {}, "divide these modules"


def test_each_class_name_occurs_once_and_no_module_is_named_by_a_gerund():
    counts = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    # Those of the lab extend the core's of the same name.
    extended = {"LLM", "AsyncLLM", "Client", "AsyncClient"}
    assert {name for name, count in counts.items() if count > 1} == extended
    assert {counts[name] for name in extended} == {2}
    names = {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}
    found = {name for name in names if re.search(r"ing(s)?$", name)}
    assert {name for name in found if name.rpartition("_")[2] not in NOUNS} == set()


def test_every_module_and_public_class_says_what_it_is_in_the_words_of_the_glossary():
    missing = [name_of(path) for path, tree in trees().items() if not ast.get_docstring(tree)]
    missing += [
        f"{file}: {node.name}"
        for file, node in classes()
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert missing == []
    found = []
    for path, node in scopes():
        said = PRIVATE.search(ast.get_docstring(node) or "")
        if said:
            found.append(f"{name_of(path)}: {said[0]}")
    assert found == []


# Words of the habits that docs/internal/design.md's glossary replaces.
PRIVATE = re.compile(
    r"\b(whoever|how manieth|what came of|comes? to nothing|the front door|wishes|rode with|"
    r"is let go|are let go|by chance|are told of|as of a)\b"
)


@pytest.mark.parametrize("script", ["import midstream", "import midstream.plugin"])
def test_importing_the_package_loads_neither_torch_nor_vllm(script):
    code = f"import sys; {script}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there_once_and_resolves_and_the_installed_version_is_the_packages():
    assert len(set(midstream.__all__)) == len(midstream.__all__)
    for name in midstream.__all__:
        assert getattr(midstream, name) is not None, name
    assert len(midstream.__all__) <= MOST_EXPORTS
    shown = set(dir(midstream))
    assert {*midstream.__all__, "errors", "plan", "__version__"} <= shown
    assert not shown & {*entries.MOVED, "annotations", "TYPE_CHECKING", "MissingExtraError"}
    for name, module in entries.MOVED.items():
        with pytest.warns(DeprecationWarning, match=rf"{name} is now {module}\.{name}"):
            old = getattr(midstream, name)
        assert old is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'midstream' has no attribute 'Llm'"):
        _ = midstream.Llm
    from importlib.metadata import version

    assert version("midstream") == midstream.__version__


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
    found = {}
    above = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:  |$)", line)
        if match and match[2].endswith("Error"):
            depth = len(match[1]) // 4
            del above[depth:]
            found[match[2]] = (above[-1] if above else None, match[3])
            above.append(match[2])
    return found


def test_the_tree_drawn_at_the_top_has_every_exception_where_it_is():
    assert set(drawn()) == set(exceptions())
    # Caught within the server, between processes, and within the demo.
    internal = {"HttpError", "MessageError", "ModelError"}
    assert set(exceptions()) - internal <= set(entries.MOVED)
    for name, (parent, builtin) in drawn().items():
        cls = exceptions()[name]
        assert cls.__doc__, name
        assert (exceptions()[parent] if parent else Exception) in cls.__bases__, name
        assert not builtin or issubclass(cls, getattr(__import__("builtins"), builtin)), name
    defined = {
        f"{name_of(path)}: {node.name}"
        for path, node in scopes()
        if isinstance(node, ast.ClassDef)
        and path.name != "errors.py"
        and any(re.search(r"(Error|Exception)$", ast.unparse(base)) for base in node.bases)
    }
    # Raised and caught within the report, or within the doctor.
    own = ("lab/report/", "lab/tools/doctor/")
    assert {name for name in defined if not name.startswith(own)} == set()


def ops():
    """The public ops: each has an eager `<op>_ref` beside it."""
    return [path.stem.removesuffix("_ref") for path in (PACKAGE / "ops").glob("*_ref.py")]


def test_there_are_ops_and_no_module_beside_them_that_belongs_to_none():
    assert ops()
    others = {path.stem for path in (PACKAGE / "ops").glob("*.py")}
    known = {f"{op}{kind}" for op in ops() for kind in ("", "_ref", "_triton", "_kernel")}
    shared = {"__init__", "layout", "reference_state", "row_views"}
    assert others - known == shared | {
        "map_kernel",
        "readings_kernel",
        "row_pairs",
        "row_pairs_kernel",
    }


@pytest.mark.parametrize("op", ops())
def test_each_op_has_its_reference_its_kernel_and_its_tests_which_take_the_same_arguments(op):
    for path in (
        PACKAGE / "ops" / f"{op}.py",
        PACKAGE / "ops" / f"{op}_ref.py",
        PACKAGE / "ops" / f"{op}_triton.py",
        ROOT / "tests" / "unit" / "ops" / f"test_{op}.py",
        ROOT / "tests" / "gpu" / f"test_{op}_triton.py",
    ):
        assert path.exists(), path
    reference = importlib.import_module(f"midstream.ops.{op}_ref")
    wanted = list(inspect.signature(getattr(reference, f"{op}_ref")).parameters)
    source = (PACKAGE / "ops" / f"{op}_triton.py").read_text()
    launcher = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == f"{op}_triton"
    )
    assert [argument.arg for argument in launcher.args.args] == wanted
