"""The Triton kernels without a GPU: in Triton's interpreter, and what they refuse."""

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

SCRIPT = Path(__file__).parent / "interpreted.py"


@pytest.mark.engine  # in a process of its own
def test_the_interpreted_kernels_do_what_their_references_do():
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


def test_rows_that_do_not_fit_a_programs_registers_are_refused():
    from midstream.ops.site_triton import site_triton

    made = case([[]], rows=1, width=32769, captures=False)
    with pytest.raises(ValueError, match="at most 32768 wide on a GPU, got 32769"):
        site_triton(*made.arguments())


def test_a_launch_is_dependent_for_few_wide_rows_on_recent_devices_only(monkeypatch):
    from midstream.ops import site_triton

    device = torch.device("cuda", 0)
    assert site_triton._capability(torch.device("cpu")) == 0
    monkeypatch.setattr(site_triton, "_capability", lambda _device: 9)
    assert site_triton._dependent_launch(1, 4096, device)
    assert site_triton._dependent_launch(16, 2048, device)
    assert not site_triton._dependent_launch(17, 4096, device)
    assert not site_triton._dependent_launch(1, 1024, device)
    monkeypatch.setattr(site_triton, "_capability", lambda _device: 8)
    assert not site_triton._dependent_launch(1, 4096, device)


class Kernels:
    """In the place of the kernel: notes what Triton launches, and what is launched again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from midstream.ops import site_triton

        self.compiled: list[dict[str, Any]] = []
        self.again: list[tuple[Any, ...]] = []
        self._names = list(inspect.signature(site_triton.site_kernel.fn).parameters)
        monkeypatch.setattr(site_triton, "site_kernel", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            bound = dict(zip(self._names, args, strict=False)) | options
            self.compiled.append(bound)
            return Compiled(self, [bound[name] for name in self._names])

        return compile_and_launch

    def launch(self, made: Any) -> Any:
        from midstream.ops import site_triton

        return site_triton.site_triton(*made.arguments())


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


def halves(rows: int, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, width), torch.ones(rows, width)


@pytest.mark.parametrize("residual", [True, False])
def test_a_kernel_is_launched_again_for_another_stream_and_the_same_buffers(monkeypatch, residual):
    kernels = Kernels(monkeypatch)
    made = case([[]], rows=5, width=32, captures=False, residual=residual)
    again = kernels.launch(made)
    hidden, other = halves(3)
    assert again(hidden, other if residual else None, made.tally)
    assert len(kernels.compiled) == 1
    ((rows, *args),) = kernels.again
    assert rows == 3
    tensors = [*made.arguments()[2:13], made.mapped]  # in the place of what SAEs decode
    assert args[0] == hidden.data_ptr()
    assert args[1] == (other.data_ptr() if residual else None)
    assert args[2:14] == [each.data_ptr() for each in tensors]


def test_a_kernel_is_not_launched_again_for_other_buffers_or_more_rows_than_these_have(monkeypatch):
    kernels = Kernels(monkeypatch)
    made = case([[]], rows=4, width=32, captures=False)
    again = kernels.launch(made)
    most = made.tokens.shape[0]
    assert not again(*halves(4), made.tally.clone())
    assert not again(*halves(most + 1), made.tally)
    assert not again(*halves(0), made.tally)
    assert kernels.again == []
    assert again(*halves(most), made.tally)


def test_rows_that_are_not_aligned_never_reach_a_kernel_that_was_compiled_for_aligned_ones(
    monkeypatch,
) -> None:
    kernels = Kernels(monkeypatch)
    made = case([[]], rows=4, width=32, captures=False)
    again = kernels.launch(made)
    for half in (0, 1):
        given = list(halves(4))
        given[half] = torch.zeros(4 * 32 + 1)[1:].view(4, 32)
        assert given[half].data_ptr() % 16
        assert not again(*given, made.tally)
        assert kernels.again == []


def test_a_kernel_that_was_compiled_for_rows_that_are_not_aligned_is_not_launched_again(
    monkeypatch,
) -> None:
    kernels = Kernels(monkeypatch)
    for name in ("hidden", "residual", "table", "ring"):
        made = case([[]], rows=4, width=32, captures=False)
        value = getattr(made, name)
        moved = torch.zeros(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape)
        setattr(made, name, moved)
        assert kernels.launch(made) is None, name


def test_streams_that_need_another_kernel_are_of_another_kind():
    from midstream.ops.site_triton import FEW_ROWS, kind_of

    hidden, other = halves(40)
    kinds = {
        kind_of(hidden, other),
        kind_of(hidden, None),
        kind_of(hidden[:16], other[:16]),
        kind_of(*halves(FEW_ROWS + 1)),
        kind_of(*halves(40, width=48)),
        kind_of(hidden.half(), other.half()),
        kind_of(hidden, other.half()),
        kind_of(hidden, torch.zeros(40, 64)[:, :32]),
        kind_of(torch.zeros(40, 64)[:, :32], other),
        kind_of(hidden, other[:39]),
    }
    assert len(kinds) == 10
    assert kind_of(hidden[:17], other[:17]) in kinds


def test_a_kernel_is_not_launched_again_with_maps_before_it_or_on_a_hip_device(monkeypatch):
    from midstream.ops import site_triton

    kernels = Kernels(monkeypatch)
    monkeypatch.setattr(site_triton, "_launch_maps", lambda *_args: None)
    assert kernels.launch(case([[]], rows=4, width=32, captures=False, maps=1)) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels.launch(case([[]], rows=4, width=32, captures=False)) is None
