"""The Triton kernels without a GPU: in Triton's interpreter, and what they refuse."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import rounds
from support.site_cases import case

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "support" / "interpreted.py"


@pytest.mark.engine  # in a process of its own
def test_the_interpreted_kernels_do_what_their_references_do() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{rounds(suite=22, nightly=44)} cases of attention" in ran.stdout


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


class Kernels:
    """In the place of the kernel: notes what Triton launches, and what it launches again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from midstream.ops import site_triton

        self.compiled: list[dict[str, Any]] = []
        self.again: list[tuple[Any, ...]] = []
        self._names = list(inspect.signature(site_triton.site_kernel.fn).parameters)
        monkeypatch.setattr(site_triton, "site_kernel", self)
        monkeypatch.setattr(site_triton, "_KERNELS", {})
        self.launch = site_triton.site_triton

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            bound = dict(zip(self._names, args, strict=False)) | options
            self.compiled.append(bound)
            return Compiled(self, [bound[name] for name in self._names])

        return compile_and_launch


class Compiled:
    def __init__(self, owner: Kernels, first: list[Any]) -> None:
        self.owner, self.first = owner, first

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid[1:] == (1, 1)

        def launch(*args: Any, stream: int | None) -> None:
            assert stream is None
            # Triton's launcher takes all arguments by position, constants included.
            assert len(args) == len(self.first)
            for given, compiled in zip(args, self.first, strict=True):
                if isinstance(compiled, torch.Tensor):
                    assert type(given) is int
                else:
                    assert given is compiled or given == compiled
            self.owner.again.append((grid[0], *args))

        return launch


def test_a_kernel_is_launched_again_without_triton_looking_it_up(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    one, two = (case([[]], rows=rows, width=32, captures=False) for rows in (3, 5))
    kernels.launch(*one.arguments())
    kernels.launch(*two.arguments())
    assert len(kernels.compiled) == 1
    ((rows, *args),) = kernels.again
    assert rows == 5
    tensors = [*two.arguments()[:13], two.mapped]  # in the place of what SAEs decode
    assert args[:14] == [each.data_ptr() for each in tensors]


def test_a_kernel_is_not_launched_again_for_what_it_was_not_compiled_for(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    first = case([[]], rows=4, width=32, captures=False)
    kernels.launch(*first.arguments())
    others = [
        case([[]], rows=4, width=48, captures=False),
        case([[]], rows=4, width=32, captures=False, dtype=torch.bfloat16),
        case([[]], rows=4, width=32, captures=False, residual=False),
    ]
    strided = first.copy()
    strided.hidden = torch.zeros(4, 64)[:, :32]
    wider = first.copy()
    wider.scores = torch.zeros(4, first.scores.shape[1] + 1)
    for made in (*others, strided, wider):
        kernels.launch(*made.arguments())
    assert len(kernels.compiled) == 6
    assert not kernels.again


@pytest.mark.parametrize("name", ["hidden", "table", "ring"])
def test_tensors_that_are_not_aligned_never_reach_a_kernel_that_was_compiled_for_aligned_ones(
    monkeypatch, name
) -> None:
    kernels = Kernels(monkeypatch)
    made = case([[]], rows=4, width=32, captures=False)
    kernels.launch(*made.arguments())
    value = getattr(made, name)
    shifted = torch.zeros(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape)
    assert shifted.data_ptr() % 16
    setattr(made, name, shifted)
    for _ in range(2):
        kernels.launch(*made.arguments())
    assert len(kernels.compiled) == 3
    assert not kernels.again


def test_a_kernel_of_a_hip_device_is_looked_up_by_triton_each_time(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    made = case([[]], rows=4, width=32, captures=False)
    for _ in range(2):
        kernels.launch(*made.arguments())
    assert len(kernels.compiled) == 2
