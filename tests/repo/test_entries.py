"""What is imported by a name in a string: `midstream.entries`, and what other packages have."""

import ast
from pathlib import Path

from support.syntax import nodes_of

import midstream
from midstream import entries

PACKAGE = Path(midstream.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# They import what is not midstream's: of vLLM and its packages, and what a user names.
FOREIGN = {
    "compat/packed_arrays.py",
    "config/controllers.py",
    "plan/local_functions.py",
    "runtime/install.py",
    "runtime/vllm/seams.py",
    "sinks/registry.py",
}
# Its names need transformers, so they are imported when they are used.
LAZY = "lab/attribution/__init__.py"


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def imports_for_types():
    """(name, module) of what the top of the package imports for type checkers alone."""
    for node in nodes_of(PACKAGE / "__init__.py"):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                yield from ((alias.name, str(statement.module)) for alias in statement.names)


def test_the_names_of_the_table_are_public_functions_that_type_checkers_see_there():
    assert set(entries.PUBLIC) <= set(midstream.__all__)
    for name in entries.PUBLIC:
        assert getattr(midstream, name) is entries.public(name), name
    for name in (*entries.COMMANDS, *entries.STORE_COMMANDS, *entries.PROBE_COMMANDS):
        assert callable(getattr(entries.command(name), name)), name
    for name in entries.METHODS:
        owner = getattr(midstream, name.partition(".")[0])
        assert callable(getattr(owner, name.partition(".")[2])), name
        assert entries.method(name).__module__.startswith("midstream.lab."), name
    assert dict(imports_for_types()) == entries.PUBLIC
    assert len(entries.routers()) == len(entries.ROUTES)
    assert all(router.routes for router in entries.routers())


def test_what_else_is_imported_by_a_string_is_of_other_packages():
    """A name that is made or given may be of any package: each file that imports such is known."""
    made, literal = set(), set()
    for path in SOURCES:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).rpartition(".")[2] not in ("import_module", "__import__"):
                continue
            if isinstance(node.args[0], ast.Constant):
                literal.add(str(node.args[0].value).partition(".")[0])
            elif not ast.unparse(node.args[0]).startswith("f'{_LAYERS}."):
                made.add(name_of(path))
    assert made == FOREIGN | {"entries.py", LAZY}
    assert literal == {"tqdm", "vllm", "yaml"}


def test_the_core_names_the_lab_in_the_table_alone():
    """The top of the package repeats it for type checkers."""
    users = set()
    for path in SOURCES:
        for node in nodes_of(path):
            named = []
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant):
                named = [node.value]
            if any(str(name).startswith("midstream.lab") for name in named):
                users.add(name_of(path))
    assert {file for file in users if not file.startswith("lab/")} == {"__init__.py", "entries.py"}
