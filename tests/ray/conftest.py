"""Tests of jobs on Ray. Those that start one take as long as engines, and are marked like them."""

from __future__ import annotations

import pytest

STARTS_RAY = ("test_alone.py", "test_dataset.py", "test_spreading.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "ray" and item.path.name in STARTS_RAY:
            item.add_marker(pytest.mark.engine)
