"""Launch of the Triton kernels of the `site` op."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor

from midstream.ops import layout
from midstream.ops.map_kernel import map_kernel
from midstream.ops.row_pairs_kernel import NEIGHBOURS
from midstream.ops.sae.launch import launch_saes
from midstream.ops.sae.reference import SaeBuffers
from midstream.ops.site_kernel import site_kernel

MAX_WIDTH = 32768  # a row is one block, in registers

# Limits within which programmatic dependent launch is faster: it hides the gap between launches of
# kernels that take about as long as the gap, and is slower for many programs or short gaps.
DEPENDENT_MAX_ROWS = 16
DEPENDENT_MIN_WIDTH = 2048
DEPENDENT_MIN_CAPABILITY = 9
# The intrinsics do not compile in Triton 3.4.
DEPENDENT_MIN_TRITON = (3, 5)
MAP_FEW_ROWS = 16
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# Values of a row that each thread has, by the number of rows, within 4 to 32 warps. Few rows end
# sooner with more threads, and many share a multiprocessor better with fewer. The figures were
# chosen on an H200, with an earlier kernel.
FEW_ROWS = 1024
VALUES_OF_FEW, VALUES_OF_MANY, VALUES_OF_MANY_WIDE = 8, 32, 16
WIDE = 8192
# Most registers of a thread, for streams of half precision, by whether it has `VALUES_OF_MANY`;
# what does not fit is kept in memory.
REGISTERS, REGISTERS_OF_MANY = 64, 128


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Launches a compiled kernel again, for another stream and the same other tensors. Triton's own
    launch takes several times as long, for which a forward pass without a CUDA graph waits at each
    site.
    """

    kernel: Any
    device: torch.device
    tally: int  # address of `tally`
    most: int  # rows, those of `tokens`
    rest: tuple[Any, ...]  # the kernel's arguments after both halves of the stream

    def __call__(self, hidden: Tensor, residual: Tensor | None, tally: Tensor) -> bool:
        """Launch the kernel for a stream of its kind; return False if it is not compiled for it."""
        rows, address = hidden.shape[0], hidden.data_ptr()
        other = 0 if residual is None else residual.data_ptr()
        if not 0 < rows <= self.most or (address | other) % 16 or tally.data_ptr() != self.tally:
            return False
        with current(self.device):
            stream = _stream(self.device)
            kernel = self.kernel
            if stream is None or _has_hooks():
                kernel[(rows, 1, 1)](address, other or None, *self.rest, stream=stream)
            else:
                # What the line above does, without the calls for profilers.
                kernel.run(
                    rows, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                    address, other or None, *self.rest,
                )  # fmt: skip
        return True


def _has_hooks() -> bool:
    """Return whether a profiler wants to know of each launch of Triton's."""
    hooks = triton.knobs.runtime
    both = hooks.launch_enter_hook, hooks.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in both)


def kind_of(hidden: Tensor, residual: Tensor | None) -> Hashable:
    """Return all of the stream's halves that a launch depends on, except for their addresses."""
    rows = hidden.shape[0]
    other = residual is not None and (
        residual.shape == hidden.shape, residual.stride(), residual.dtype
    )  # fmt: skip
    return (
        hidden.shape[1:], hidden.stride(), hidden.dtype, hidden.get_device(), other,
        rows <= DEPENDENT_MAX_ROWS, rows <= FEW_ROWS,
    )  # fmt: skip


def site_triton(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    ids: Tensor,
    tally: Tensor,
    table: Tensor,
    instructions: Tensor,
    params: Tensor,
    lists: Tensor,
    bank: Tensor,
    scores: Tensor,
    ring: Tensor,
    mapped: Tensor,
    sae: SaeBuffers | None = None,
    encodes: bool = False,
) -> Relaunch | None:
    """Launch the kernels; return what launches them again, or None. See `site_ref`."""
    num_rows, width = hidden.shape
    unit = bank.shape[1]
    if width > MAX_WIDTH:
        raise ValueError(f"hidden must be at most {MAX_WIDTH} wide on a GPU, got {width}")
    if num_rows == 0:
        return None
    device = hidden.device
    has_residual, has_maps = residual is not None, mapped.shape[0] > 0
    has_saes = sae is not None
    decoded = mapped if sae is None else sae.decoded
    rest = hidden if residual is None else residual
    tensors = (
        hidden, residual, tokens, ids, tally, table, instructions, params, lists, bank, scores,
        ring, mapped, decoded,
    )  # fmt: skip
    shapes = scores.shape[1], mapped.shape[1], decoded.shape[1]
    strides = hidden.stride(0), rest.stride(0), tally.shape[1], *shapes
    has = has_residual, has_maps, has_saes
    dependent = _dependent_launch(num_rows, width, device)
    options = _launch_options(width, unit, hidden.dtype, dependent, num_rows <= FEW_ROWS)
    with current(device):
        if has_maps and width <= mapped.shape[1]:
            _launch_maps(hidden, residual, tokens, table, instructions, bank, mapped)
        if sae is not None and encodes:
            precision = _precision(hidden.dtype)
            launch_saes(hidden, residual, tokens, table, instructions, bank, sae, precision)
        kernel = site_kernel[(num_rows,)](
            *tensors,
            *strides,
            has_residual=has_residual,
            has_maps=has_maps,
            has_saes=has_saes,
            **options,
        )
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    is_aligned = not reduce(or_, [address for address in addresses if address is not None]) % 16
    # On HIP, a kernel also depends on the sizes of tensors.
    if has_maps or has_saes or not is_aligned or kernel is None or torch.version.hip is not None:
        return None
    constants = width, unit, *has, options["block"], options["limit"], dependent
    rest_of = *addresses[2:], *strides, *constants
    return Relaunch(kernel, device, tally.data_ptr(), tokens.shape[0], rest_of)


def _launch_maps(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    table: Tensor,
    instructions: Tensor,
    bank: Tensor,
    mapped: Tensor,
) -> None:
    """Launch the kernel of MAPs, for all rows: a captured graph may be replayed with any."""
    num_rows, width = hidden.shape
    rest = hidden if residual is None else residual
    # A row of a few reads the whole matrix, so that its columns are shared out to many programs.
    tile_rows, tile_columns, depth = (16, 32, 128) if num_rows <= MAP_FEW_ROWS else (64, 64, 32)
    tiles = triton.cdiv(num_rows, tile_rows), triton.cdiv(width, tile_columns)
    map_kernel[tiles](
        hidden, residual, tokens, table, instructions, bank, mapped,
        num_rows, hidden.stride(0), rest.stride(0), mapped.shape[1],
        width=width,
        unit=bank.shape[1],
        has_residual=residual is not None,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        depth=depth,
        precision=_precision(hidden.dtype),
        num_warps=4,
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """Return how products are computed: three of 11 bits have errors of 2⁻²², on tensor cores."""
    return "tf32x3" if dtype.itemsize == 2 and torch.version.hip is None else "ieee"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device current, without PyTorch's cost if it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = nullcontext()


def _stream(device: torch.device) -> int | None:
    """Return the handle of the current stream; None for Triton to find it."""
    if device.type != "cuda":
        return None
    handle: int = triton.runtime.driver.active.get_current_stream(device.index)
    return handle


@cache
def _launch_options(
    width: int, unit: int, dtype: torch.dtype, dependent: bool, is_few: bool
) -> dict[str, int | float | bool]:
    """Return the kernel's constants and the launch's options, the same at every site of a model."""
    block = max(triton.next_power_of_2(width), NEIGHBOURS.value)
    values = VALUES_OF_MANY if block <= WIDE else VALUES_OF_MANY_WIDE
    warps = min(max(block // (VALUES_OF_FEW if is_few else values) // 32, 4), 32)
    options: dict[str, int | float | bool] = {
        "width": width,
        "unit": unit,
        "block": block,
        "limit": layout.limit_of(str(dtype).removeprefix("torch.")),
        "dependent": dependent,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    # Only CUDA devices know these.
    if dtype.itemsize == 2 and torch.version.hip is None:
        has_many = block <= WIDE and block // (32 * warps) == VALUES_OF_MANY
        options["maxnreg"] = REGISTERS_OF_MANY if has_many else REGISTERS
    if dependent:
        options["launch_pdl"] = True
    return options


def _dependent_launch(num_rows: int, width: int, device: torch.device) -> bool:
    """Return whether to launch before the preceding kernel ends (dependent launch)."""
    return (
        num_rows <= DEPENDENT_MAX_ROWS
        and width >= DEPENDENT_MIN_WIDTH
        and _capability(device) >= DEPENDENT_MIN_CAPABILITY
        and _TRITON >= DEPENDENT_MIN_TRITON
    )


@cache
def _capability(device: torch.device) -> int:
    """Return the device's major CUDA compute capability; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]
