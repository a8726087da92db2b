"""CONTRIBUTING.md against the code: its folders, its walks, and the files of its changes."""

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WALKS = ["An offline request", "An HTTP request", "One captured row into a store"]
CHANGES = [
    "Add an operation",
    "Add a read-out",
    "Add a codec",
    "Add a layer convention",
    "Add an HTTP route",
    "Check a new vLLM release",
]
MAX_HOPS = 14
FUNCTION = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
RETURN = "(return)"


def rows_below(heading):
    """The cells of the first table below a heading, without its head."""
    below = TEXT.split(f"\n{heading}\n")[1]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table
    lines = [line.strip("|\n").split("|") for line in table[0].splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def hops(walk):
    """(process, folder) of each row of a walk."""
    found = []
    for process, function, _ in rows_below(f"### {walk}"):
        match = FUNCTION.fullmatch(function)
        assert match, f"{walk}: expected `file: function`, got {function}"
        found.append((process, PurePosixPath(match[1]).parent.as_posix()))
    return found


def names_in(file):
    """Functions, classes and methods (`Class.method`) of a file."""
    found = set()
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return found


def entered_again(folders):
    """The folders that are entered after they were left. A folder is left for one outside it."""
    left = set()
    found = []
    for before, after in pairwise(folders):
        inside = {after, *map(str, PurePosixPath(after).parents)}
        left |= {before, *map(str, PurePosixPath(before).parents)} - inside
        found += sorted(left & inside)
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_every_function_of_a_walk_exists_and_it_enters_no_folder_again_but_on_the_return(walk):
    named = [FUNCTION.findall(" ".join(row)) for row in rows_below(f"### {walk}")]
    missing = [
        f"{file}: {name}"
        for row in named
        for file, name in row
        if not (PACKAGE / file).is_file() or name not in names_in(file)
    ]
    assert missing == []
    assert len(rows_below(f"### {walk}")) <= MAX_HOPS
    found = hops(walk)
    (turn,) = [nth for nth, (process, _) in enumerate(found) if RETURN in process]
    folders = [folder for _, folder in found]
    assert entered_again(folders[:turn]) == []
    assert entered_again(folders[turn:]) == []
    before = ""
    for process, _ in hops(walk):
        name = process.partition("(")[0].strip()
        plain = name.strip("*")
        assert name == (plain if plain == before else f"**{plain}**")
        before = plain


@pytest.mark.parametrize("change", CHANGES)
def test_the_files_of_a_change_have_the_names_that_it_says(change):
    for files, what in rows_below(f"### {change}"):
        paths = [PACKAGE / name for name in re.findall(r"`([\w/.]+)`", files)]
        paths = [path if path.exists() else ROOT / path.name for path in paths]
        text = "".join(
            each.read_text(encoding="utf-8")
            for path in paths
            for each in (path.rglob("*.py") if path.is_dir() else [path])
        )
        for name in re.findall(r"`@?([A-Za-z_]+)[^`/]*`", what):
            assert re.search(rf"\b{name}\b", text), f"{change}: {files} has no {name}"


def test_a_folder_that_is_entered_again_is_found():
    assert entered_again(["a/b", "a", "a/c", "d"]) == []
    assert entered_again(["a", "b", "a/c"]) == ["a"]
    assert entered_again(["a/b", "a", "a/b"]) == ["a/b"]


def test_the_guide_is_short_and_its_folders_are_there():
    assert len(TEXT.split()) <= 2300
    assert len(TEXT.encode()) <= 15 * 1024
    cells = [row[0] for row in rows_below("## What is where")]
    named = [name.strip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) == len(set(named))
    there = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")} - {Path()}
    assert set(named) <= {folder.as_posix() for folder in there}
    inner = {parent for name in named for parent in map(str, PurePosixPath(name).parents)}
    lost = [
        folder.as_posix()
        for folder in there
        if not any(folder.is_relative_to(name) for name in named) and folder.as_posix() not in inner
    ]
    assert lost == []


def test_every_file_of_the_package_is_printed_with_what_it_says_of_itself():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tree.py"], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 1) for line in done.stdout.splitlines()]
    printed = {name for name, *_ in lines}
    assert {path.name for path in PACKAGE.rglob("*.py")} - {"__init__.py"} <= printed
    assert [line for line in lines if len(line) < 2 and line[0].endswith(".py")] == []
