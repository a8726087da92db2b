"""The stored notebooks: short, executed as they stand, and free of what differs by machine."""

import ast
import re

import nbformat
import pytest
from support import notebooks
from support.notebook_outputs import CHECKS, texts_of

NAMES = [
    "causal_tracing",
    "live_probe",
    "logit_lens",
    "refusal_direction",
    "sae_feature",
    "steer_and_tune",
]
BY_NAME = pytest.mark.parametrize("path", notebooks.PATHS, ids=lambda path: path.stem)
PAGE = notebooks.ROOT / "docs" / "notebooks.md"
# Lines of the same tasks by hand, with a release that had no sweeps, fits, lenses or pictures.
BEFORE = dict(zip(NAMES, (27, 46, 24, 24, 39, 35), strict=True))
ROW = re.compile(r"\(\.\./examples/notebooks/(\w+)\.ipynb\) \|.*\| (\d+) \| (\d+) \|")


def test_there_are_six_and_the_page_lists_them_with_their_lines():
    found = {path.stem: notebooks.read(path) for path in notebooks.PATHS}
    assert sorted(found) == NAMES
    lines = {name: (BEFORE[name], notebooks.midstream_lines(found[name])) for name in NAMES}
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert {name: (int(before), int(now)) for name, before, now in rows} == lines


@BY_NAME
def test_a_notebook_is_valid_short_and_its_cells_that_do_not_count_use_nothing_of_midstream(path):
    found = notebooks.read(path)
    nbformat.validate(found)
    assert 0 < notebooks.midstream_lines(found) <= notebooks.MOST_LINES
    lines = [line for cell in notebooks.code_cells(found) for line in cell.source.split("\n")]
    assert max(map(len, lines)) <= 100
    names = notebooks.names_of_midstream(found)
    for cell in filter(notebooks.is_plain, notebooks.code_cells(found)):
        nodes = ast.walk(notebooks.parse(cell.source))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not used & names
        assert "midstream" not in cell.source
    texts = [cell.source for cell in found.cells if cell.cell_type == "markdown"]
    for target in re.findall(r"\]\((\.\.[^)#]*)", "\n".join(texts)):
        assert (path.parent / target).exists(), target


@BY_NAME
def test_stored_outputs_are_of_the_stored_code(path):
    found = notebooks.read(path)
    assert found.metadata["midstream"]["source"] == notebooks.source_hash(found), (
        "run scripts/notebooks.py"
    )
    numbers = [cell.execution_count for cell in notebooks.code_cells(found)]
    assert numbers == sorted(set(numbers)), "cells were executed in another order"
    shown = [data for data in outputs(found) if {"text/html", "image/svg+xml"} & set(data)]
    assert len(shown) >= 2


@BY_NAME
def test_stored_outputs_show_what_the_text_says(path):
    CHECKS[path.stem](texts_of(notebooks.read(path)))


@BY_NAME
def test_outputs_have_no_paths_errors_or_log_lines(path):
    assert path.stat().st_size <= notebooks.MOST_BYTES
    found = notebooks.read(path)
    for cell in notebooks.code_cells(found):
        assert {one.output_type for one in cell.outputs} <= {"execute_result", "display_data"}
    for data in outputs(found):
        assert len({"image/png", "image/svg+xml"} & set(data)) < 2, "a chart is stored twice"
        for text in data.values():
            assert not notebooks.NOISE.search(text), notebooks.NOISE.search(text)


def test_noise_is_found():
    noise = [
        "see /ho" + "me/someone/x",
        "Traceback (most recent call last)",
        "10.5it/s]",
        "INFO 1-2",
    ]
    assert all(map(notebooks.NOISE.search, noise))
    assert not notebooks.NOISE.search("in and/or https://example.org/home/page, ../../home/x")


def test_lines_are_counted_without_blank_ones_and_comments():
    assert notebooks.lines_of("# a comment\n\nx = 1  # one\n    \nf(\n    x\n)") == 4


def outputs(notebook):
    """The data of all outputs, by type."""
    return [
        one["data"]
        for cell in notebooks.code_cells(notebook)
        for one in cell.outputs
        if "data" in one
    ]
