"""Writer of the table of docs/never.md: faults of scripts/broken_builds.py, by part.

scripts/never_table.py [--check]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import markers
from support.faults import FAULTS
from support.planting import Package

# A part with so many faults has three examples.
MANY = 10


def pages() -> dict[str, dict[str, str]]:
    """Return every block, by page and name."""
    return {"docs/never.md": {"faults": faults()}}


def faults() -> str:
    """Return the number of faults of each part of the package, with the first ones."""
    package = Package(Path(__file__).parents[1] / "src" / "midstream")
    texts: dict[str, list[str]] = defaultdict(list)
    for fault in FAULTS:
        folders = package.place(fault).path.parts[:-1]
        depth = 2 if folders[:1] in (("lab",), ("runtime",)) else 1
        part = "/".join(folders[:depth]) or "midstream"
        texts[part].append(fault.never)
    rows = [
        [f"`{part}`", str(len(never)), "; ".join(never[: 3 if len(never) >= MANY else 1])]
        for part, never in sorted(texts.items(), key=lambda row: -len(row[1]))
    ]
    rows.append(["all", str(len(FAULTS)), ""])
    return markers.table(["part", "faults", "for example"], rows)


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
