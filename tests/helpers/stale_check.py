"""A stale graph is impossible: the check itself, for the CPU's tests and the GPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.engines import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
TAPS = [
    {"sites": ["resid_post"], "layers": "all"},
    {"sites": ["resid_mid"], "layers": [1]},
    {"sites": ["resid_post"], "layers": "all"},
]


def run(cache: Path, model: Path, settings: str, args: dict[str, Any]) -> dict[str, Any]:
    """What one engine did, on the shared cache."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.stale", str(model), settings, json.dumps(args)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(cache),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            ),
        },
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError(f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def check_no_stale_graph(cache: Path, model: Path, args: dict[str, Any]) -> None:
    """Plain, then enabled, then with other taps, then the first taps again, then plain."""
    plain = run(cache, model, "plain", args)
    for settings in TAPS:
        found = run(cache, model, json.dumps(settings), args)
        wanted = {
            (site, layer)
            for site in settings["sites"]
            for layer in range(len(found["taps"]))
            if settings["layers"] == "all"
        } or {("resid_mid", 1)}
        assert {tuple(tap) for tap in found["taps"]} == wanted
        assert found["plain"] == plain["plain"]
        assert abs(found["moved"] - 3.0) < 0.1, "the edit did not reach its own site"
    assert run(cache, model, "plain", args)["plain"] == plain["plain"]
