"""The table of promises: each is shown by a test that exists, or named as open with its reason."""

import ast
import functools
import json
import re
from pathlib import Path

import pytest
from support import rival_rows
from support.seed_rows import COUNTS, DESIGN, FAMILIES, FAMILIES_NOT_SEEN, HERE, OPEN, ROWS

ROOT = Path(__file__).resolve().parents[2]
RUN = "tests/engine/test_seed_sentences.py"


@functools.cache
def functions(path):
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {
        node.name: node
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@functools.cache
def names(path):
    return set(re.findall(r"^ *(?:async )?def (\w+)", (ROOT / path).read_text(), re.MULTILINE))


def test_every_promise_has_a_row():
    expected = [f"{seed}.{nth}" for seed, count in COUNTS.items() for nth in range(1, count + 1)]
    assert list(ROWS) == expected


def test_every_promise_is_shown_by_a_test_or_named_as_open():
    reasons = set()
    for row, (_, shown) in ROWS.items():
        if shown.startswith("open: "):
            reasons.add(shown.removeprefix("open: "))
        elif shown not in (HERE, DESIGN):
            path, _, name = shown.partition("::")
            assert f"test_{name}" in names(path), f"{row}: {shown} does not exist"
    assert reasons == set(OPEN), "each reason has a row"


@pytest.mark.parametrize("run", OPEN.values())
def test_what_is_open_has_no_result_yet(run):
    (row,) = [
        line
        for line in (ROOT / "docs/internal/gpu-runs.md").read_text().splitlines()
        if f"| {run} |" in line
    ]
    assert row == f"| {run} | – | – |", "it was run: name its test in ROWS"


@functools.cache
def right_classes() -> set[str]:
    """Classes of vLLM that the doctor found right."""
    models = json.loads((ROOT / "docs/data/models.json").read_text())["models"]
    return {name for name, model in models.items() if model["outcome"] == "ok"}


def test_over_a_hundred_architectures_were_seen_to_be_right():
    assert len(right_classes()) > 100


def test_the_families_that_are_named_were_seen_to_be_right():
    seen = {
        family
        for family in f"{FAMILIES} {FAMILIES_NOT_SEEN}".split()
        if any(name.lower().startswith(family.lower()) for name in right_classes())
    }
    assert seen == set(FAMILIES.split()), "a family that is seen at last leaves FAMILIES_NOT_SEEN"


def test_an_idle_engine_was_measured_at_the_speed_of_plain_vllm():
    """Of the newest result on a GPU of 8B parameters; the limit is three times the noise there."""
    newest = max((ROOT / "benchmarks/results").glob("*-h200-overhead-8b.json"))
    workloads = json.loads(newest.read_text())["shapes"]["8b"]
    idle = {
        name: workload["idle"]["of_plain"]
        for name, workload in workloads.items()
        if name.startswith(("decode", "prefill"))
    }
    assert len(idle) == 4
    assert {name: ratio for name, ratio in idle.items() if ratio > 1.01} == {}


def test_the_rows_that_are_run_are_those_that_tests_name():
    named = [
        argument.value
        for function in functions(RUN).values()
        for call in function.decorator_list
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "shows"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    assert sorted(named) == sorted(row for row, (_, shown) in ROWS.items() if shown == HERE)


def test_what_other_projects_ask_is_shown_by_a_test_or_named_as_lacking():
    reasons = set()
    for row in rival_rows.ROWS:
        if row.shown.startswith("lacking: "):
            reasons.add(row.shown.removeprefix("lacking: "))
        elif row.shown != "nothing":
            path, _, name = row.shown.partition("::")
            assert f"test_{name}" in names(path), f"{row}: {row.shown} does not exist"
    assert reasons == set(rival_rows.LACKING), "each reason has a row"


def test_the_page_says_what_is_lacking():
    page = " ".join((ROOT / "docs/coming-from.md").read_text().split())
    for reason in rival_rows.LACKING.values():
        assert reason in page
