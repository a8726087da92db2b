"""The faults of `scripts/broken_builds.py` can be planted, and their tests exist."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from support.faults import FAULTS
from support.planting import Package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package():
    return Package(ROOT / "src" / "midstream")


@functools.cache
def text_of(file):
    return (ROOT / file).read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.never for fault in FAULTS])
def test_each_fault_can_be_planted_and_has_a_test_that_finds_it(package, fault):
    package.plant(fault)
    file, _, name = fault.test.partition("::")
    assert f"def {name}" in text_of(file)


def test_no_fault_is_there_twice():
    assert len({fault.never for fault in FAULTS}) == len(FAULTS)
