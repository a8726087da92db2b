"""Copies of what a step leaves on the device into pinned memory, and clearing of its tally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from midstream.transport.arena import Extent

_ALIGNMENT = 16  # bytes; see `copy_kernel`


class ResultCopy(Protocol):
    """Queues copies on the current stream."""

    def __call__(
        self,
        tally: Tensor,
        host_tally: Tensor,
        scores: Tensor,
        host_scores: Tensor,
        rows: Sequence[tuple[Tensor, Extent]],
    ) -> None:
        """Queue the copies, and then the clearing of the tally.

        Args:
            tally: int32 [tokens, 4], contiguous; zero afterwards.
            host_tally: the same on the host.
            scores: float32 [tokens, slots], contiguous.
            host_scores: the same on the host.
            rows: uint8, encoded rows on the device, each with an extent of as many bytes. A copy
                into one that is not pinned blocks.

        The host's other memory is pinned. Nobody else uses it until the copies are complete.
        """
        ...


def copy_with_torch(
    tally: Tensor,
    host_tally: Tensor,
    scores: Tensor,
    host_scores: Tensor,
    rows: Sequence[tuple[Tensor, Extent]],
) -> None:
    """Queue a copy for each tensor; see `ResultCopy`."""
    host_tally.copy_(tally, non_blocking=True)
    tally.zero_()
    if scores.numel():
        host_scores.copy_(scores, non_blocking=True)
    for encoded, extent in rows:
        extent.memory.copy_(encoded.reshape(-1), non_blocking=extent.pinned)


class CopyByKernel:
    """Copies everything in one launch, which takes the host a fraction of the time of a copy for
    each tensor. Rows that are not aligned are copied with PyTorch.
    """

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel for a device."""
        from midstream.ops.launch import launch
        from midstream.transport.copy_kernel import BLOCK, PROGRAMS, copy_kernel

        tally = torch.zeros(4, dtype=torch.int32, device=device)
        scores = torch.zeros(4, device=device)
        tensors = tally, tally, scores, scores, tally, tally
        self._kernel: Any = copy_kernel[(PROGRAMS,)](*tensors, 0, 0, 0, block=BLOCK, num_warps=4)
        self._device = device
        self._launch = launch
        self._programs, self._block = PROGRAMS, BLOCK

    def __call__(
        self,
        tally: Tensor,
        host_tally: Tensor,
        scores: Tensor,
        host_scores: Tensor,
        rows: Sequence[tuple[Tensor, Extent]],
    ) -> None:
        source = target = size = 0
        for encoded, extent in rows:
            flat = encoded.reshape(-1)
            place, goal, length = flat.data_ptr(), extent.memory.data_ptr(), flat.numel()
            if size or not extent.pinned or (place | goal | length) % _ALIGNMENT:
                extent.memory.copy_(flat, non_blocking=extent.pinned)
            else:
                source, target, size = place, goal, length
        self._launch(
            self._kernel, self._programs, self._device,
            tally.data_ptr(), host_tally.data_ptr(), scores.data_ptr(), host_scores.data_ptr(),
            source, target, tally.shape[0], scores.numel(), size // _ALIGNMENT, self._block,
        )  # fmt: skip


def result_copy(device: torch.device) -> ResultCopy:
    """Return what copies the results of steps from a device."""
    # On HIP, a compiled kernel also depends on the sizes of tensors.
    if device.type != "cuda" or torch.version.hip is not None:
        return copy_with_torch
    return CopyByKernel(device)
