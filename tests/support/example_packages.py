"""Packages of examples/, installed into a folder of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.own_process import ROOT


def install(name: str, folder: Path) -> Path:
    """Install a package of examples/ by pip; return the folder. A build writes beside its source,
    so that is a copy.
    """
    source = folder / "source"
    shutil.copytree(ROOT / "examples" / name, source)
    target = folder / "installed"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "--quiet", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target
