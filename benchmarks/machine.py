"""Description of machine, versions and commit for the JSON of a benchmark."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# Commit of a copied tree; a trailing "+" means uncommitted changes.
COMMIT = os.environ.get("COMMIT", "")


def describe(checkout: Path | None = None) -> dict[str, Any]:
    """Return machine, versions and commit as JSON values; `checkout`: of midstream, None: this."""
    import torch
    import vllm

    import midstream

    git = ["git", "-C", str(checkout or ".")]
    device = "cpu"
    driver = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = _output(query).splitlines()[0] if _output(query) else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "driver": driver,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "midstream": midstream.__version__,
        # A copy of the tree on a GPU host may have no git history: then COMMIT is set.
        "commit": COMMIT.removesuffix("+")
        or _output([*git, "rev-parse", "--short", "HEAD"])
        or "unknown",
        "changed": COMMIT.endswith("+")
        if COMMIT
        else bool(_output([*git, "status", "--porcelain", "--untracked-files=no"])),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
