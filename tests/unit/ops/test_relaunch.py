"""Launches of the op's kernel by kept addresses; `tests/gpu/test_site_triton.py` runs it."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from midstream.ops import site_triton  # noqa: E402

REST = (11, 12.5, None)


class Kernel:
    """A compiled kernel, as Triton calls one, which notes the arguments of its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args, stream=None: self.launched.append(("hooked", *grid, stream, *args))

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        assert args[:5] == ("function", "metadata", None, None, None)
        self.launched.append(("bare", x, y, z, stream, *args[5:]))


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.zeros(3, 8)


def launches(hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    tally = torch.zeros(4, 4, dtype=torch.int32)
    kernel = Kernel()
    again = site_triton.Relaunch(kernel, hidden.device, tally.data_ptr(), 4, REST)
    assert again(hidden, residual, tally)
    return kernel.launched


def test_it_is_given_the_addresses_of_the_stream_and_what_was_kept(monkeypatch, hidden):
    monkeypatch.setattr(site_triton, "_stream", lambda device: 7)
    other = torch.zeros(3, 8)
    assert launches(hidden) == [("bare", 3, 1, 1, 7, hidden.data_ptr(), None, *REST)]
    addresses = hidden.data_ptr(), other.data_ptr()
    assert launches(hidden, other) == [("bare", 3, 1, 1, 7, *addresses, *REST)]


def test_a_profiler_of_tritons_sees_each_launch(monkeypatch, hidden):
    monkeypatch.setattr(site_triton, "_stream", lambda device: 7)
    seen = ("hooked", 3, 1, 1, 7, hidden.data_ptr(), None, *REST)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, lambda metadata: None)
            assert launches(hidden) == [seen]
