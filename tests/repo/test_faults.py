"""The faults of `scripts/broken_builds.py` match the code, and their tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.never for fault in FAULTS])
def test_each_fault_can_be_planted_and_has_a_test_that_finds_it(fault):
    assert (ROOT / "src/midstream" / fault.file).read_text().count(fault.old) == 1
    file, _, name = fault.test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


def test_no_fault_is_there_twice():
    assert len({fault.never for fault in FAULTS}) == len(FAULTS)
