"""Check that tests find faults: midstream is broken on purpose, one fault at a time.

For each fault of `tests/support/planted`, a copy of the package with the fault takes precedence
over the installed package, and the test that must find it runs, in a fork of a process that has
imported vLLM: that takes eight seconds. Prints a table; the exit status is the number of faults
that were not found.

    python scripts/broken_builds.py [--jobs N] [--control] [words of the faults to try …]

With --control the package is copied as it is: every test must pass, so no fault may be found.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.faults import FAULTS, Fault  # noqa: E402
from support.planting import NoPlaceError, Package  # noqa: E402

_SOURCE = ROOT / "src" / "midstream"
_PACKAGE = Package(_SOURCE)
_LIMIT = 900  # seconds for one test
# A fault must be found by what is run by default.
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly")
_IMPORTS = ("pytest", "hypothesis", "support.preloaded_vllm")


@dataclass
class Attempt:
    """A fault whose test runs in a process of its own."""

    fault: Fault
    folder: tempfile.TemporaryDirectory[str]
    began: float
    pid: int

    @staticmethod
    def start(fault: Fault, is_control: bool) -> Attempt | None:
        """Start the test of a fault; None: the fault has no place, which is printed."""
        try:
            path, text = _PACKAGE.plant(fault)
        except NoPlaceError as error:
            sys.stdout.write(f"{error}\n")
            _show("out of date", 0, fault)
            return None
        folder = tempfile.TemporaryDirectory()
        broken = Path(folder.name) / "midstream"
        shutil.copytree(_SOURCE, broken)
        if not is_control:
            (broken / path).write_text(text)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run(fault.test, folder.name)
        return Attempt(fault, folder, time.monotonic(), pid)

    def end(self, status: int) -> bool:
        """Print a line of the table; return whether the fault was found."""
        output = (Path(self.folder.name) / "output").read_text(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        # A test that failed may leave threads which end the process with another status.
        if code == 1 or "\nFAILED " in output:
            verdict = "found"
        elif code == 0:
            verdict = "NOT FOUND"
        else:  # the test could not run, so it neither passed nor failed
            verdict = "not run"
            sys.stdout.write(output[-2000:])
        _show(verdict, time.monotonic() - self.began, self.fault)
        self.folder.cleanup()
        return verdict == "found"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    parser.add_argument("--control", action="store_true", help="leave the faults out")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args(arguments)
    words = [word.lower() for word in asked.words]
    chosen = [fault for fault in FAULTS if all(word in fault.never.lower() for word in words)]
    for name in _IMPORTS:
        importlib.import_module(name)
    assert "midstream" not in sys.modules, "the children import the package with the fault"
    found = sum(_attempts(chosen, asked.jobs, asked.control))
    sys.stdout.write(f"{found} of {len(chosen)} faults were found\n")
    return found if asked.control else len(chosen) - found


def _attempts(faults: list[Fault], jobs: int, is_control: bool) -> Iterator[bool]:
    """Try faults, so many at once; yield whether each was found, as the tests end."""
    running: dict[int, Attempt] = {}
    waiting = list(reversed(faults))
    while waiting or running:
        while waiting and len(running) < jobs:
            if (attempt := Attempt.start(waiting.pop(), is_control)) is not None:
                running[attempt.pid] = attempt
        for pid, attempt in list(running.items()):
            if time.monotonic() - attempt.began > _LIMIT:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                yield attempt.end(status)
        time.sleep(0.05)


def _run(test: str, folder: str) -> NoReturn:
    """Run a test in this process, a fork, with the package that lies in a folder."""
    os.setsid()
    output = os.open(Path(folder) / "output", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(ROOT)
    paths = [folder, str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths
    code = 3
    try:
        pytest = importlib.import_module("pytest")
        code = int(pytest.main([*_OPTIONS, test]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _show(verdict: str, seconds: float, fault: Fault) -> None:
    sys.stdout.write(f"{verdict:12} {seconds:5.0f} s  {fault.never}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
