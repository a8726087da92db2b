"""Tests of jobs on Ray. Those that start one take as long as engines, and are marked like them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

STARTS_RAY = ("test_alone.py", "test_dataset.py", "test_spreading.py")
TESTS = Path(__file__).resolve().parents[3]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "ray" and item.path.name in STARTS_RAY:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module", autouse=True)
def actors_find_the_tests() -> Iterator[None]:
    """Their processes import what pytest has made importable in this one."""
    found = os.environ.get("PYTHONPATH") or str(TESTS.parent / "src")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), found]))
        yield
