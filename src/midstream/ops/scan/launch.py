"""Launch of the Triton kernel of SCANs."""

from __future__ import annotations

import triton
from torch import Tensor

from midstream.ops.scan.kernel import scan_kernel
from midstream.ops.site_triton import current

TILE_ROWS = 16
MAX_DEPTH = 512  # columns of a tile that are read at a time
WARPS = 8


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
    """Launch the kernel; see `midstream.ops.scan.reference.scan_ref`, which has the same arguments.
    `kept` is a power of 2. The grid is for all states, so a captured graph may be replayed with any
    rows.
    """
    width = hidden.shape[1]
    rest = hidden if residual is None else residual
    with current(hidden.device):
        scan_kernel[(scans.shape[0],)](
            hidden, residual, tokens, ids, tally, table, instructions, params, lists, bank, scores,
            scans, states, hidden.stride(0), rest.stride(0), scores.shape[1],
            width=width,
            unit=bank.shape[1],
            has_residual=residual is not None,
            kept=states.shape[1],
            tile=TILE_ROWS,
            depth=min(triton.next_power_of_2(width), MAX_DEPTH),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
