"""midstream's seams against the sources of each supported release of vLLM."""

import ast
from pathlib import Path

import pytest
from support import releases
from support.syntax import nodes_of

from midstream.runtime.vllm import seams
from midstream.runtime.vllm.seam_lines import Fields, Seam

import seam_sources  # isort: skip
import seams as seams_script  # isort: skip
import versions_table  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"


def test_every_seam_is_as_it_is_counted_on(release):
    wrong = [f for f in seams_script.check(release) if f.problem is not None]
    assert not wrong, f"vLLM {seam_sources.Release(release).version}:\n{seams_script.table(wrong)}"


def test_the_installed_release_is_checked_and_those_that_the_error_names_are_recorded():
    recorded = versions_table.read()
    run = {name for name, checks in recorded.items() if "engine" in checks}
    run |= versions_table.gpu_runs().keys() & recorded.keys()
    assert {f"{name}.0" for name in seams.RUN} == run
    installed = releases.installed_release()
    if installed is None:
        pytest.skip("vLLM is not installed")
    assert installed[0] in releases.names()


def test_whatever_is_wrapped_is_a_seam():
    tree = ast.parse((PACKAGE / "runtime" / "install.py").read_text(encoding="utf-8"))
    wrapped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_wrap":
            module, cls, name = (ast.literal_eval(argument) for argument in node.args[:3])
            wrapped.add((module, f"{cls}.{name}"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_KEY_MODULES":
            wrapped |= {(m, "generate_block_hash_extra_keys") for m in ast.literal_eval(node.value)}
    assert len(wrapped) > 8
    assert wrapped <= {(seam.module, seam.name) for seam in seams.SEAMS}


def test_whatever_is_imported_from_vllm_is_a_seam():
    known = {(seam.module, seam.name.partition(".")[0]) for seam in seams.SEAMS}
    for fields in seams.FIELDS:
        known |= {(fields.module, name) for name in (fields.names if not fields.owner else ())}
        known.add((fields.module, fields.owner))
    imported = set()
    adapters = [*(PACKAGE / "runtime").rglob("*.py"), *PACKAGE.rglob("api/*.py")]
    for path in adapters:
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                imported |= {(node.module, alias.name) for alias in node.names}
    assert len(imported) > 10
    assert imported <= known


ENGINE = """
from vllm.base import Base
from vllm.base import helper as other

class Engine(Base):
    limit: int = 3

    def __init__(self, config, *, log=True):
        self.config = config
        if log:
            self.logged: bool = True

    @property
    def size(self): ...

    def sleep(self, level, mode=0, *rest, by, until=None, **named): ...

    async def step(self, request, wave, /, *, flag=None): ...
"""
BASE = """
class Base:
    def inherited(self, a, b): ...

def helper(x, y): ...
"""


@pytest.fixture
def made(tmp_path):
    """A small vLLM, release 1.5."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "_version.py").write_text("__version__ = version = '1.5.0'\n")
    (folder / "engine.py").write_text(ENGINE)
    (folder / "base.py").write_text(BASE)
    return seam_sources.Release(folder)


def seam(name, *parameters, named=(), called=False):
    return Seam("vllm.engine", name, parameters, "why", named=named, called=called)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (seam("Engine.__init__", "config"), None),
        (seam("Engine.__init__", "config", named=("log",)), None),
        (seam("Engine.step", "request", "wave"), None),
        (seam("Engine.inherited", "a"), None),
        (seam("other", "x", "y"), None),
        (seam("Engine.__init__", "settings"), "takes (config, log), expected (settings, …)"),
        (
            seam("Engine.__init__", "config", "log"),
            "takes (config, *, log), expected (config, log, …)",
        ),
        (seam("Engine.__init__", named=("log", "color")), "takes no color"),
        (seam("Engine.inherited", "a", "b", "c"), "takes (a, b), expected (a, b, c, …)"),
        (seam("Engine.step", "request", "wave", called=True), None),
        (seam("Engine.inherited", "a", "b", called=True), None),
        (seam("Engine.inherited", "a", named=("b",), called=True), None),
        (
            seam("Engine.inherited", called=True),
            "requires a, b, which midstream does not pass",
        ),
        (
            seam("Engine.sleep", "level", called=True),
            "requires by, which midstream does not pass",
        ),
        (seam("Engine.stop"), "is missing"),
        (seam("Engine.config"), "is missing"),
        (seam("Motor.step"), "is missing"),
        (seam("helper"), "is missing"),
        (Seam("vllm.gone", "f", (), "why"), "is missing"),
    ],
)
def test_a_function_that_differs_is_named_with_what_it_takes(made, asked, problem):
    assert made.check(asked) == seam_sources.Finding(f"{asked.module}.{asked.name}", "why", problem)


def fields(owner, *names, since="", until=""):
    return Fields("vllm.engine", owner, names, "why", since=since, until=until)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (fields("Engine", "limit", "config", "logged", "size", "inherited"), None),
        (fields("", "Engine", "other"), None),
        (fields("Engine", "limit", "speed", "color"), "has no speed, color"),
        (fields("", "engine"), "has no engine"),
        (fields("Motor", "limit"), "is missing"),
        (fields("Engine", "speed", until="1.4"), None),
        (
            fields("Engine", "limit", until="1.4"),
            "has limit, expected from the first to 1.4 only",
        ),
        (fields("Engine", "speed", until="1.5"), "has no speed"),
        (fields("Engine", "speed", since="1.6"), None),
        (fields("Engine", "size", since="1.10"), "has size, expected from 1.10 to the last only"),
        (fields("Engine", "speed", since="1.5"), "has no speed"),
        (Fields("vllm.gone", "", ("a",), "why"), "is missing"),
    ],
)
def test_an_attribute_that_is_gone_is_named(made, asked, problem):
    found = made.check_fields(asked)
    assert found.problem == problem
    assert found.name == f"{asked.module}.{asked.owner}".rstrip(".")


def test_the_table_of_a_release_has_each_seam_and_what_differs():
    findings = [
        seam_sources.Finding("vllm.a.f", "reason one", None),
        seam_sources.Finding("vllm.longer.g", "reason two", "is missing"),
    ]
    assert seams_script.table(findings).splitlines() == [
        "vllm.a.f       ok",
        "vllm.longer.g  is missing (reason two)",
    ]
