"""Launches of compiled Triton kernels by the addresses of their tensors.

Triton itself looks a kernel up by each argument, compares each global variable, and asks the driver
about each tensor at each launch. That takes several times as long as the launch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

_NOTHING = nullcontext()


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any) -> None:
    """Launch a kernel on the current stream of a device.

    Args:
        kernel: what an earlier launch of it returned.
        programs: number of programs.
        device: the device.
        arguments: all arguments of the kernel in order, also constants: addresses for tensors,
            aligned as those of the earlier launch.
    """
    with current(device):
        stream = _stream(device)
        if stream is None or _has_hooks():
            kernel[(programs, 1, 1)](*arguments, stream=stream)
        else:
            # What the line above does, without the calls for profilers.
            kernel.run(
                programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                *arguments,
            )  # fmt: skip


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device current. It does nothing if the device is current, as
    entering `torch.cuda.device` takes time at each launch.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def _stream(device: torch.device) -> int | None:
    """Return the handle of the current stream; None for Triton to find it."""
    if device.type != "cuda":
        return None
    handle: int = triton.runtime.driver.active.get_current_stream(device.index)
    return handle


def _has_hooks() -> bool:
    """Return whether a profiler wants to know of each launch of Triton's."""
    hooks = triton.knobs.runtime
    both = hooks.launch_enter_hook, hooks.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in both)
