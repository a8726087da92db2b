"""Writer of the table of docs/never.md from the faults that scripts/broken_builds.py injects.

scripts/never_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import markers
from support.faults import FAULTS


def pages() -> dict[str, dict[str, str]]:
    """Return every block, by page and name."""
    return {"docs/never.md": {"faults": faults()}}


def faults() -> str:
    """Return the table of faults, each with the test that fails on a build with the fault."""
    rows = []
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        rows.append([fault.never, f"`{Path(file).stem}`: `{name or 'all'}`"])
    return markers.table(["what must never happen", "test that fails on a build with it"], rows)


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
