"""Says of any vLLM release which of midstream's seams are as they should be, and what differs.

scripts/seams.py 0.34.0 [0.33.0 …] [--differs]
scripts/seams.py --installed

The release is fetched by name, see vllm_releases.py; nothing of it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import vllm_releases
from seam_sources import Finding, Release

from midstream.runtime.vllm.seams import FIELDS, SEAMS


def check(root: Path) -> list[Finding]:
    """Every seam in the sources of one release.

    Args:
        root: its `vllm` folder.
    """
    release = Release(root)
    return [*map(release.check, SEAMS), *map(release.check_fields, FIELDS)]


def table(findings: list[Finding]) -> str:
    """One line a seam, with what differs, and what it is for."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        if finding.problem is None:
            lines.append(f"{finding.name:<{width}}  ok")
        else:
            lines.append(f"{finding.name:<{width}}  {finding.problem} ({finding.why})")
    return "\n".join(lines)


def main() -> int:
    """The exit status: 1 if a seam of any release differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", help="releases, in full, such as 0.33.0")
    parser.add_argument("--installed", action="store_true", help="the one that is installed")
    parser.add_argument("--differs", action="store_true", help="show only what differs")
    options = parser.parse_args()
    roots = [vllm_releases.fetch(version) for version in options.versions]
    if options.installed:
        roots.append(installed())
    if not roots:
        parser.error("name a release, or give --installed")
    differ = 0
    for root in roots:
        findings = check(root)
        wrong = [finding for finding in findings if finding.problem is not None]
        differ += len(wrong)
        sys.stdout.write(f"vLLM {Release(root).version}: {len(wrong)} of {len(findings)} differ\n")
        shown = wrong if options.differs else findings
        sys.stdout.write(f"{table(shown)}\n" if shown else "")
    return int(differ > 0)


def installed() -> Path:
    """The `vllm` folder of the installed package.

    Raises:
        ModuleNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vLLM is not installed")
    return Path(spec.origin).parent


if __name__ == "__main__":
    raise SystemExit(main())
