"""File of the survey, docs/data/models.json, and what other hosts found.

scripts/survey_file.py FILE … adds results of further runs of scripts/models_survey.py: those that
say more than what is there.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from markers import ROOT
from survey_examine import Candidate

FILE = ROOT / "docs/data/models.json"
# How much an outcome says; a wrong one always counts.
_RANKS = {
    "cannot be built": 0,
    "not compared": 1,
    "not comparable": 1,
    "refused": 2,
    "ok": 3,
    "wrong": 9,
}


def entry(candidate: Candidate, said: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of the file for a report."""
    sites = said.get("sites", [])
    found: dict[str, Any] = {
        "runs": candidate.runs,
        "outcome": said["outcome"],
        "reason": said["reason"],
    }
    if said.get("compared_with"):
        found["compared_with"] = said["compared_with"]
    if candidate.multimodal:
        found["multimodal"] = True
    found |= {name: said[name] for name in ("images", "without") if said.get(name)}
    if sites:
        found["layer_classes"] = said["layer_classes"]
        found["layers"] = 1 + max(one["layer"] for one in sites)
        for outcome in ("lacking", "not compared"):
            found[outcome] = _by_reason([one for one in sites if one["outcome"] == outcome])
        found["compared"] = sum(one["outcome"] == "ok" for one in sites)
        found["operations"] = sum(one["outcome"] == "ok" for one in said["operations"])
        found["worst"] = float(f"{said['worst']:.1e}") if said["worst"] is not None else None
    return found


def _by_reason(sites: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in sites:
        names = found.setdefault(one["reason"], [])
        if one["site"] not in names:
            names.append(one["site"])
    return found


def read(path: Path) -> dict[str, Any]:
    if path.exists():
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read
    return {"models": {}}


def write(path: Path, found: dict[str, Any]) -> None:
    from midstream.lab.tools.doctor.examine import versions

    found["versions"] = dict(versions())
    found["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found["models"] = dict(sorted(found["models"].items(), key=lambda item: item[0].lower()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def merge(found: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Add the results of another run that say as much as the ones there; return their names."""
    added = []
    host = other.get("host")
    versions = ", ".join(f"{name} {version}" for name, version in other["versions"].items())
    for name, result in other["models"].items():
        there = found["models"].get(name)
        is_new = host is None and there is not None and there["outcome"] == "wrong"
        if there is not None and not is_new:
            more, less = _rank(result), _rank(there)
            if more < less or (host and more == less):
                continue
        found["models"][name] = {**result, "host": f"{host}: {versions}"} if host else result
        added.append(name)
    found["models"] = dict(sorted(found["models"].items(), key=lambda item: item[0].lower()))
    return added


def _rank(result: dict[str, Any]) -> tuple[int, bool, bool]:
    images = result.get("images", "")
    return _RANKS[result["outcome"]], bool(images), "tower" in images


def main() -> int:
    """Add the results in the files that are named."""
    found = read(FILE)
    for path in map(Path, sys.argv[1:]):
        added = merge(found, read(path))
        sys.stdout.write(f"{path}: {len(added)} added: {' '.join(added)}\n")
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
