"""Check of midstream's seams against the sources of any vLLM release.

scripts/seams.py 0.34.0 [0.33.0 …] [--differs]
scripts/seams.py --installed

The release's sources are fetched, see vllm_releases.py; nothing is installed.
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
    """Check every seam against the sources of one release.

    Args:
        root: the release's `vllm` folder.
    """
    release = Release(root)
    return [*map(release.check, SEAMS), *map(release.check_fields, FIELDS)]


def table(findings: list[Finding]) -> str:
    """Return one line per seam, with its difference and its use."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        if finding.problem is None:
            lines.append(f"{finding.name:<{width}}  ok")
        else:
            lines.append(f"{finding.name:<{width}}  {finding.problem} ({finding.why})")
    return "\n".join(lines)


def main() -> int:
    """Check the releases. Return the exit status: 1 if a seam of any release differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", help="releases, in full, such as 0.33.0")
    parser.add_argument("--installed", action="store_true", help="check the installed release")
    parser.add_argument("--differs", action="store_true", help="show only differences")
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
    """Return the `vllm` folder of the installed package.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vLLM is not installed")
    return Path(spec.origin).parent


if __name__ == "__main__":
    raise SystemExit(main())
