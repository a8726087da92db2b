"""Faults that a build must not have, each with the test that finds it; see `scripts/broken_builds.py`.

Most are what another tool does, or did: an edit or a capture that is silently wrong. They are in the
files `faults_*.py` beside this one, a tuple of them in each.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from support.fault import Fault


def _all() -> tuple[Fault, ...]:
    """The faults of all files, by name of the file and in the order there."""
    faults: dict[int, Fault] = {}
    for file in sorted(Path(__file__).parent.glob("faults_*.py")):
        for value in vars(importlib.import_module(f"support.{file.stem}")).values():
            if isinstance(value, tuple) and all(isinstance(item, Fault) for item in value):
                faults |= {id(fault): fault for fault in value}
    return tuple(faults.values())


FAULTS = _all()
