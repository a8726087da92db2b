"""Check that tests find faults: midstream is broken on purpose, one fault at a time.

For each fault of `tests/support/planted`, a copy of the package with the fault takes precedence
over the installed package, and the test that must find it runs. Prints a table; the exit status is
the number of faults that were not found.

    python scripts/broken_builds.py [--jobs N] [words of the faults to try …]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.faults import FAULTS, Fault  # noqa: E402
from support.planting import NoPlaceError, Package  # noqa: E402

_SOURCE = ROOT / "src" / "midstream"
_PACKAGE = Package(_SOURCE)
_LIMIT = 900  # seconds for one test
# A fault must be found by what is run by default.
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args(arguments)
    words = [word.lower() for word in asked.words]
    chosen = [fault for fault in FAULTS if all(word in fault.never.lower() for word in words)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        missed = sum(pool.map(_is_missed, chosen))
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} faults were found\n")
    return missed


def _is_missed(fault: Fault) -> bool:
    """Try a fault, and print a line of the table."""
    began = time.monotonic()
    verdict = _try(fault)
    seconds = time.monotonic() - began
    sys.stdout.write(f"{verdict:12} {seconds:5.0f} s  {fault.never}\n")
    sys.stdout.flush()
    return verdict != "found"


def _try(fault: Fault) -> str:
    """Return `found`, `NOT FOUND`, `out of date`, or `not run`."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "midstream"
        shutil.copytree(_SOURCE, broken)
        try:
            path, text = _PACKAGE.plant(fault)
        except NoPlaceError as error:
            sys.stdout.write(f"{error}\n")
            return "out of date"
        (broken / path).write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *_OPTIONS, fault.test],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "tests")])},
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
    # A test that failed may leave threads which end the process with another status.
    if done.returncode == 1 or "\nFAILED " in done.stdout:
        return "found"
    if done.returncode == 0:
        return "NOT FOUND"
    # The test could not run, so it neither passed nor failed.
    sys.stdout.write(done.stdout[-2000:])
    return "not run"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
