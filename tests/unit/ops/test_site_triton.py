"""The Triton kernel without a GPU: its arithmetic, in Triton's interpreter, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.site_cases import case

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "support" / "interpreted.py"


def test_the_interpreted_kernel_does_what_the_reference_does() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rows edited" in ran.stdout


def test_rows_that_do_not_fit_a_programs_registers_are_refused() -> None:
    from midstream.ops.site_triton import site_triton

    made = case([[]], rows=1, width=32769, captures=False)
    with pytest.raises(ValueError, match="at most 32768 wide on a GPU, got 32769"):
        site_triton(*made.arguments())


def test_a_launch_is_dependent_for_few_wide_rows_on_recent_devices_only(monkeypatch) -> None:
    from midstream.ops import site_triton

    device = torch.device("cuda", 0)
    monkeypatch.setattr(site_triton, "_capability", lambda _device: 9)
    assert site_triton._dependent_launch(1, 4096, device)
    assert site_triton._dependent_launch(16, 2048, device)
    assert not site_triton._dependent_launch(17, 4096, device)
    assert not site_triton._dependent_launch(1, 1024, device)
    monkeypatch.setattr(site_triton, "_capability", lambda _device: 8)
    assert not site_triton._dependent_launch(1, 4096, device)


def test_a_cpu_has_no_compute_capability() -> None:
    from midstream.ops.site_triton import _capability

    assert _capability(torch.device("cpu")) == 0
