"""Runs Python in a process of its own, with the tests' helpers and the package in its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str | Path, timeout: float, **env: str) -> str:
    """Runs `python ARGUMENTS`, which must end well; what it printed.

    The package is that of PYTHONPATH where one is set, as a build that is broken on purpose is.
    """
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH") or str(ROOT / "src")]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (
        f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout
