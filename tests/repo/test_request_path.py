"""A plain plan enters few files: what it does not ask for has no part in its way."""

import ast
from pathlib import Path

import pytest
from repo.request_path import entered, front_end_stages, worker_stages
from support.syntax import nodes_of

import midstream
from midstream.plan.readouts import KINDS
from midstream.results.readouts import RESULTS

# A change that enters more files says in its commit what they are for.
MOST_RESOLVED = 30
MOST_OF_A_WORKER = 40
# What the commit of a new read-out touches.
MOST_OF_A_READ_OUT = 6
PACKAGE = Path(midstream.__file__).parent
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))


def test_a_plain_plan_is_resolved_by_few_files():
    files = entered(front_end_stages(), lambda name: name.startswith("resolve"))
    assert len(files) <= MOST_RESOLVED, sorted(files)


def test_a_plain_request_and_its_step_enter_few_files_of_the_worker():
    files = entered(worker_stages(), lambda _: True)
    assert 10 < len(files) <= MOST_OF_A_WORKER, sorted(files)


@pytest.mark.parametrize(("key", "most"), [("norms", MOST_OF_A_READ_OUT), ("features", 14)])
def test_a_read_out_is_named_by_few_files_of_the_package(key: str, most: int):
    """Its file, that of its result, the two tables, and the two lists of public names; one that
    reads registered weights, also what registers these.
    """
    kind, result = KINDS[key], RESULTS[key]
    files = {path for path in PACKAGE_FILES if _names_any(path, kind, result)}
    ours = {PACKAGE / f"{path}.py" for path in (f"plan/readouts/{key}", f"results/readouts/{key}")}
    assert ours | {PACKAGE / "results/readouts/__init__.py", PACKAGE / "__init__.py"} <= files
    assert len(files) <= most, sorted(files)


def _names_any(path: Path, *kinds: type) -> bool:
    """Return whether a file defines one of some classes, or imports it or from its module."""
    modules = {kind.__module__ for kind in kinds}
    if path.with_suffix("").relative_to(PACKAGE.parent).as_posix().replace("/", ".") in modules:
        return True
    lists = ("midstream", "midstream.plan", "midstream.plan.readouts", "midstream.results.readouts")
    return any(
        node.module in modules
        or (
            node.module in lists
            and any(a.name == kind.__name__ for a in node.names for kind in kinds)
        )
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
    )
