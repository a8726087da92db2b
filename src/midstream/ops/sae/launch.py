"""Launch of the Triton kernels of SAEs' reconstructions."""

from __future__ import annotations

import triton
from torch import Tensor

from midstream.ops.sae.kernel import change_kernel, decode_kernel, encode_kernel
from midstream.ops.sae.reference import SaeBuffers

_FEW_ROWS = 16
_BLOCK = 1024


def launch_saes(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    table: Tensor,
    instructions: Tensor,
    bank: Tensor,
    sae: SaeBuffers,
    precision: str,
) -> None:
    """Launch the kernels of SAEs, for all rows: a captured graph may be replayed with any."""
    num_rows, width = hidden.shape
    rest = hidden if residual is None else residual
    at_once, features = sae.codes.shape
    # A row of a few reads whole matrices, so that their columns are shared out to many programs.
    few = num_rows <= _FEW_ROWS
    tile_rows, tile_columns, depth = (16, 32, 128) if few else (64, 64, 32)
    shape = {
        "unit": bank.shape[1],
        "has_residual": residual is not None,
        "width": width,
        "tile_rows": tile_rows,
        "tile_columns": tile_columns,
        "depth": depth,
        "precision": precision,
        "num_warps": 4,
    }
    codes_stride = sae.codes.stride(0)
    strides = hidden.stride(0), rest.stride(0), codes_stride
    for first in range(0, num_rows, at_once):
        last = min(num_rows, first + at_once)
        tiles = triton.cdiv(last - first, tile_rows)
        programs = tokens, table, instructions, bank, sae.weights, sae.codes
        encode_kernel[tiles, triton.cdiv(features, tile_columns)](
            hidden, residual, *programs, first, last, *strides, **shape
        )
        change_kernel[(last - first,)](
            *programs, first, last, codes_stride, unit=bank.shape[1], block=_BLOCK, num_warps=4
        )
        decode_kernel[tiles, triton.cdiv(width, tile_columns)](
            hidden, residual, *programs, sae.decoded, first, last, *strides, **shape
        )
