"""The faults of `scripts/broken_builds.py` can be planted, and their tests exist."""

import functools
from pathlib import Path

import pytest
from support.faults import FAULTS
from support.planting import NoPlaceError, Package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package():
    return Package(ROOT / "src" / "midstream")


@functools.cache
def text_of(file):
    return (ROOT / file).read_text()


def problem(package, fault):
    """Return what keeps a fault from being planted and found; None if nothing does."""
    file, _, name = fault.test.partition("::")
    if not (ROOT / file).is_file() or f"def {name}" not in text_of(file):
        return f"no test {fault.test}"
    try:
        package.plant(fault)
    except (NoPlaceError, SyntaxError) as error:
        return str(error)
    return None


def test_each_fault_is_there_once_can_be_planted_and_has_a_test_that_finds_it(package):
    problems = {fault.never: problem(package, fault) for fault in FAULTS}
    assert {never: text for never, text in problems.items() if text is not None} == {}
    assert len({fault.never for fault in FAULTS}) == len(FAULTS)
