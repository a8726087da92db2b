"""Table of docs/internal/never.md: faults of scripts/broken_builds.py, by part. Only the site
has it (site_hooks.py).
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


def site_tables() -> dict[str, str]:
    """Return the tables that only the site has, by name."""
    return {"faults": faults()}


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
