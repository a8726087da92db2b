"""Launch of the Triton kernel of SCANs."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from midstream.ops.scan.kernel import scan_kernel
from midstream.ops.site_triton import current

TILE_ROWS = 16
MAX_DEPTH = 512  # columns of a tile that are read at a time
WARPS = 8
REGISTERS = 128  # most of a thread: two programs share a multiprocessor, also those that exit


def scan_triton(
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
    scans: Tensor,
    states: Tensor,
) -> None:
    """Launch `scan_ref`'s kernel for all states: a captured graph may be replayed with any rows."""
    width = hidden.shape[1]
    block = triton.next_power_of_2(width)
    rest = hidden if residual is None else residual
    with current(hidden.device):
        scan_kernel[(scans.shape[0],)](
            hidden, residual, tokens, ids, tally, table, instructions, params, lists, bank, scores,
            scans, states, hidden.stride(0), rest.stride(0), tally.shape[1], scores.shape[1],
            width=width,
            unit=bank.shape[1],
            has_residual=residual is not None,
            kept=states.shape[1],
            tile=TILE_ROWS,
            depth=min(block, MAX_DEPTH),
            block=block,
            **launch_options(),
        )  # fmt: skip


@cache
def launch_options() -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": WARPS, "enable_fp_fusion": False}
    if torch.version.hip is None:  # only CUDA devices know it
        options["maxnreg"] = REGISTERS
    return options
