"""Record of the seconds that each file of tests takes, and a check of a run against it.

    python scripts/durations.py record RUN.xml     writes tests/durations.json
    python scripts/durations.py check RUN.xml      exit status 1 if a file exceeds its limit

RUN.xml is what `pytest --junitxml=RUN.xml` writes. tests/conftest.py begins with the files that
take longest. The limit of a file is 1.5 times its recorded time plus 15 seconds. If the machine of
the run is slower than that of the record, limits increase by the same factor.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "durations.json"
_SHARE, _SLACK_SECONDS = 1.5, 15.0
# Minimum seconds of files whose ratio measures the speed of the machine.
_LONG_SECONDS = 5.0


def seconds_by_file(run: Path) -> dict[str, float]:
    """Return the seconds that each file took in a run, by its path within `tests`."""
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(run).iter("testcase"):
        name = file_of(case.get("classname", ""))
        if name:
            found[name] += float(case.get("time", 0))
    return {name: round(seconds, 1) for name, seconds in sorted(found.items())}


def file_of(classname: str) -> str:
    """Return the path within `tests` of pytest's dotted name of a file or class."""
    parts = classname.split(".")[1:]
    while parts and not (ROOT / "tests" / "/".join(parts)).with_suffix(".py").exists():
        parts.pop()
    return "/".join(parts) + ".py" if parts else ""


def too_slow(found: dict[str, float], recorded: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return {file: (its seconds, its limit)} of the files beyond their limits."""
    ratios = [
        found[name] / seconds
        for name, seconds in recorded.items()
        if seconds >= _LONG_SECONDS and name in found
    ]
    slower = max(1.0, median(ratios)) if ratios else 1.0
    limits = {
        name: seconds * slower * _SHARE + _SLACK_SECONDS for name, seconds in recorded.items()
    }
    return {
        name: (seconds, limits[name])
        for name, seconds in found.items()
        if name in limits and seconds > limits[name]
    }


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in ("record", "check"):
        sys.stderr.write(__doc__ or "")
        return 2
    found = seconds_by_file(Path(words[1]))
    if words[0] == "record":
        text = json.dumps({"seconds": round(sum(found.values())), "files": found}, indent=1)
        RECORD.write_text(text + "\n", encoding="utf-8")
        return 0
    slow = too_slow(found, json.loads(RECORD.read_text(encoding="utf-8"))["files"])
    for name, (seconds, limit) in slow.items():
        sys.stdout.write(
            f"tests/{name} took {seconds:.0f} s, more than its limit of {limit:.0f} s: make it "
            "faster, mark slow tests `nightly`, or record it again with scripts/durations.py\n"
        )
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
