"""Writer of the table of releases, from docs/versions.json and benchmarks/results/*.json; the site
has the page's other tables (site_hooks.py).

scripts/versions_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import markers

from midstream.runtime.vllm.seams import FIELDS

RECORD = markers.ROOT / "docs" / "versions.json"
RESULTS = markers.ROOT / "benchmarks" / "results"
NOT_RUN = "–"


def pages() -> dict[str, dict[str, str]]:
    """Return every block that is written, by page and name."""
    return {"docs/versions.md": {"releases": overview(read(), gpu_runs())}}


def site_tables() -> dict[str, str]:
    """Return the tables that only the site has, by name."""
    return {"engine tests": engine_tests(read()), "differences": differences()}


def read() -> dict[str, dict[str, Any]]:
    """Return the records, by release."""
    releases: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))["releases"]
    return releases


def gpu_runs() -> dict[str, dict[str, Any]]:
    """Return the machine and date of the latest result on a GPU, by release."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        machine = json.loads(path.read_text("utf-8")).get("machine", {})
        if "NVIDIA" in machine.get("device", ""):
            known = found.get(machine["vllm"])
            if known is None or known["date"] < machine["date"]:
                found[machine["vllm"]] = machine
    return found


def overview(releases: dict[str, dict[str, Any]], on_gpu: dict[str, dict[str, Any]]) -> str:
    """Return the table of checks and their dates, by release."""
    rows = []
    for version, checks in releases.items():
        rows.append(
            [
                version,
                _sources(checks),
                _engine(checks),
                _gpu(on_gpu.get(version.partition("+")[0])),
            ]
        )
    return markers.table(["vLLM", "sources", "engine tests on the CPU", "on a GPU"], rows)


def engine_tests(releases: dict[str, dict[str, Any]]) -> str:
    """Return the table of outcomes by test file and by tested release."""
    run = {version: checks["engine"] for version, checks in releases.items() if "engine" in checks}
    names = sorted({name for record in run.values() for name in record["files"]})
    head = ["tests/engine", *(f"{record['package']}" for record in run.values())]
    rows = [
        [f"`{name}`", *(_outcome(record["files"].get(name)) for record in run.values())]
        for name in names
    ]
    facts = ("torch", "transformers", "python")
    rows += [[fact, *(str(record[fact]) for record in run.values())] for fact in facts]
    rows.append(["commits", *(_commits(record["files"]) for record in run.values())])
    return markers.table(head, rows)


def differences() -> str:
    """Return the table of attributes that midstream uses in some releases only."""
    rows = [
        [
            f"`{fields.module}.{fields.owner}`".replace(".`", "`"),
            ", ".join(f"`{name}`" for name in fields.names),
            fields.since or "first",
            fields.until or "last",
            fields.why,
        ]
        for fields in FIELDS
        if fields.since or fields.until
    ]
    return markers.table(["class or module", "names", "from", "to", "used for"], rows)


def _sources(checks: dict[str, Any]) -> str:
    found = checks.get("sources")
    if found is None:
        return NOT_RUN
    outcome = f"{len(found['differ'])} of {found['seams']} seams differ"
    if not found["differ"]:
        outcome = f"{found['seams']} seams as expected"
    return f"{outcome}, {found['date']}"


def _engine(checks: dict[str, Any]) -> str:
    found = checks.get("engine")
    if found is None:
        return NOT_RUN
    total = {
        key: sum(counts[key] for counts in found["files"].values())
        for key in ("passed", "failed", "skipped")
    }
    return f"{_outcome(total)} in {len(found['files'])} files, {found['date']}"


def _gpu(machine: dict[str, Any] | None) -> str:
    if machine is None:
        return NOT_RUN
    return f"{machine['device']}, {machine['date'].partition(' ')[0]}, {machine['commit']}"


def _commits(files: dict[str, dict[str, Any]]) -> str:
    return "; ".join(sorted({counts["commit"] for counts in files.values()}))


def _outcome(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return NOT_RUN
    said = [f"{counts[key]} {key}" for key in ("passed", "failed", "skipped") if counts[key]]
    return ", ".join(said) or "none"


if __name__ == "__main__":
    raise SystemExit(markers.main(pages(), __doc__))
